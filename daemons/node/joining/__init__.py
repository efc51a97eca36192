"""Which node of a run this machine is, and how it meets the others."""
