"""What an optimizerd decides: pure, without clocks, threads or memory."""
