"""What a memoryd decides: pure, without clocks, files or sockets."""
