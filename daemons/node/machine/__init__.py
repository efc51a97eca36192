"""What a node's supervisor decides: pure, without clocks, processes or sockets."""
