"""``penstock chaos``: trains with injected faults, and compares every byte with a run without."""
