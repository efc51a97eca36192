"""The command line and the Python interface. Code that needs torch runs in other processes."""
