"""What a mirrord decides: pure, without clocks, files or sockets."""
