"""Measures the costs of blocks and copies on this machine: the work of ``penstock profile``."""
