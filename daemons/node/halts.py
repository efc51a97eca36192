"""Children that a signal has stopped: for how long, and when that is too long.

The scheduler notices the silence of members, but only of those that have joined; nobody else would
notice one that is stopped before its first word, or a schedulerd. Pure: time is an argument.
"""

from __future__ import annotations


class Halts:
    """Since when children stand still. ``timeout_s``: how long one may."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[str, float] = {}

    def look(self, halted: frozenset[str], now_s: float) -> tuple[str, ...]:
        """Which of the children that stand still now have done so for too long, by name."""
        self._since_s = {name: self._since_s.get(name, now_s) for name in sorted(halted)}
        return tuple(n for n, since_s in self._since_s.items() if now_s - since_s > self._timeout_s)
