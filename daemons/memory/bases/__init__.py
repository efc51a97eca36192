"""Frozen weights that runs share: filled, adopted and kept by memoryds."""
