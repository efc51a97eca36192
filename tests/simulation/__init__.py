"""A whole cluster in one process under virtual time; see ``docs/SIMULATION.md``."""
