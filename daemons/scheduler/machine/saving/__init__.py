"""Saves: one at a time, written while attempts go on."""
