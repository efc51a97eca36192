"""Decides for a memoryd: pure, without clocks, files or sockets."""
