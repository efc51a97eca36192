"""How the scheduler's cost grows with the number of nodes; see :mod:`bench.scale.__main__`."""
