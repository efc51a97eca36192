"""Decides for a node's supervisor: pure, without clocks, processes or sockets."""
