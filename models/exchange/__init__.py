"""Checkpoints of other trainers, read and written with the optimizer's state."""
