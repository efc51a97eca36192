"""What still fits before a stopped run is killed from outside: pure arithmetic on times.

Nothing is lost by a save that is given up: memory keeps the state, and what was written has a
temporary name. So a save is left out only when it cannot end in time; in doubt it is begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.run.stopping import Patience, reserve_s

FASTEST_BYTES_PER_S = 10e9
"""No storage of a node takes checksummed state faster than this."""
USUAL_BYTES_PER_S = 200e6
"""What a save is expected to take as long as none was seen."""
BARRIER_S = 2.0
"""Dropping an attempt and beginning a new epoch, without which nothing can be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Of a stop. ``give_up_s``: from then on nothing is waited for but the members' farewell.
    ``leave_by_s``: the scheduler leaves then, whoever is still there.
    """

    give_up_s: float
    leave_by_s: float

    @classmethod
    def of(cls, asked_s: float, within_s: float) -> Deadline:
        """Of a stop asked for at ``asked_s`` that may take ``within_s``."""
        give_up_s = Patience.SCHEDULER.give_up_s(asked_s, within_s)
        return cls(give_up_s=give_up_s, leave_by_s=give_up_s + reserve_s(within_s) / 4)


class SavePace:
    """How long saves of ``num_bytes`` take on ``num_nodes`` that write at the same time."""

    def __init__(self, num_bytes: int, num_nodes: int) -> None:
        self._share_bytes = num_bytes / num_nodes
        self._shortest_s: float | None = None
        self._last_s: float | None = None

    def finished(self, seconds: float) -> None:
        """A save took so long, settling included."""
        self._last_s = seconds
        self._shortest_s = min(seconds, self._shortest_s or seconds)

    @property
    def least_s(self) -> float:
        """No save takes less."""
        if self._shortest_s is not None:
            return self._shortest_s / 2
        return self._share_bytes / FASTEST_BYTES_PER_S

    @property
    def expected_s(self) -> float:
        """What the next save may well take."""
        if self._last_s is not None:
            return self._last_s
        return self._share_bytes / USUAL_BYTES_PER_S

    def hopeless(self, now_s: float, deadline: Deadline) -> bool:
        """Whether no save that begins now can end in time."""
        return now_s + self.least_s > deadline.give_up_s

    def forgoes(self, end_s: float, deadline: Deadline) -> bool:
        """Whether work that ends at ``end_s`` leaves no time to save after it."""
        return end_s + self.expected_s + BARRIER_S > deadline.give_up_s
