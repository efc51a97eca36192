"""Measures on this machine what blocks and copies take: the work of ``penstock profile``."""
