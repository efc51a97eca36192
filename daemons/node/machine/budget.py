"""How often a process may be started anew before somebody has to look. Pure: the time comes in."""

from __future__ import annotations

from dataclasses import dataclass, field

BUDGET_S = 3600.0
"""Restarts longer ago are forgotten."""


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """The restarts of one process that count: those of the last hour, since the last commit.

    A run that gets on may lose processes for as long as it lasts; one that does not get on is not
    to spin for ever. ``limit`` is ``cluster.max_restarts``.
    """

    limit: int
    _spent_s: list[float] = field(default_factory=list)

    @property
    def spent(self) -> int:
        """How many restarts counted when the last one was asked for."""
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
        """The run has got on: what was before does not count."""
        self._spent_s.clear()
