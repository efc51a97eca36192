"""Pins: outcomes that no move and no new name in the code may change."""
