"""Frozen weights that runs share: their identity."""
