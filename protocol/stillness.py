"""Processes that a signal has stopped (SIGSTOP), as their parents see them: for how long. Pure.

The kernel's word is taken, not heartbeats: a loaded machine delays those, and kills nobody by this.
"""

from __future__ import annotations

SHORTEST_JUMP_S = 4.0
"""Who sees nothing for so long was stopped itself, or its machine was."""


class Stillness:
    """Since when processes stand still. ``silence_s``: how long one may.

    ``jump_s``: for how long nobody had looked at the last look, if that was so long that the looker
    must have been stopped itself; else 0.
    """

    def __init__(self, silence_s: float) -> None:
        self.jump_s = 0.0
        self._silence_s = silence_s
        self._looked_s: float | None = None
        self._since_s: dict[str, float] = {}

    def look(self, stopped: frozenset[str], now_s: float) -> dict[str, float]:
        """Who of those that are stopped now has been for too long, and for how long (seconds); told
        once, then time starts anew, as it does for all after a jump.
        """
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        self.jump_s = gap_s if gap_s > max(self._silence_s / 2, SHORTEST_JUMP_S) else 0.0
        known = {} if self.jump_s else self._since_s
        self._since_s = {name: known.get(name, now_s) for name in sorted(stopped)}
        late = {
            name: now_s - since_s
            for name, since_s in self._since_s.items()
            if now_s - since_s > self._silence_s
        }
        for name in late:
            del self._since_s[name]
        return late
