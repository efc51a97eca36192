"""Planted faults that the simulation must find: named ones, and automatic ones."""
