"""Decisions of the scheduler: pure code without clocks, files or sockets."""
