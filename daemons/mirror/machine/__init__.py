"""Decides for a mirrord: pure, without clocks, files or sockets."""
