"""Preloaded processes: each has imported what others need, and forks them when asked."""
