"""What the scheduler decides: pure, without clocks, files or sockets."""
