"""Measures whether samples that share a row, or a micro-batch, change each other."""
