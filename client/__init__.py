"""The command line: what users start, ask and see. It starts what needs torch as processes."""
