"""Shared memory of a run: segments, byte layout, block tables, control words.

Imports nothing else of Penstock but the native atomics, and never torch.
"""
