"""Limits the restarts of a process without progress of the run. Pure: callers pass the time."""

from __future__ import annotations

from dataclasses import dataclass, field

BUDGET_S = 3600.0
"""Restarts longer ago are forgotten."""


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """Counts the restarts of one process in the last hour since the last commit.

    A run that progresses may lose processes without limit; a run without progress must not restart
    them for ever. ``limit`` is ``cluster.max_restarts``.
    """

    limit: int
    _spent_s: list[float] = field(default_factory=list)

    @property
    def spent(self) -> int:
        """Restarts that counted at the last request."""
        return len(self._spent_s)

    def take(self, now_s: float) -> bool:
        """Returns whether there may be one more at ``now_s`` (any monotonic clock), and counts
        it.
        """
        self._spent_s = [when_s for when_s in self._spent_s if now_s - when_s < BUDGET_S]
        if len(self._spent_s) >= self.limit:
            return False
        self._spent_s.append(now_s)
        return True

    def forgive(self) -> None:
        """Forgets earlier restarts: the run has progressed."""
        self._spent_s.clear()
