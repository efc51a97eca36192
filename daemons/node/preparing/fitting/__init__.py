"""Plans of a run held against the memory of a machine, and what would let them fit."""
