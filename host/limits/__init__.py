"""Limits of a command: CPU time and memory of its work, and the life of its temporary folders."""
