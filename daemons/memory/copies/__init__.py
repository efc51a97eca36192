"""Copies of the weights for other programs, while training continues."""
