"""Finds this machine's node in a run, and connects it with the other nodes."""
