"""What happened in a scheduler's life, in plain numbers that only grow, for its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum


class BreakCause(StrEnum):
    """Why an attempt was dropped undecided. ``LOST``: a process died, or its stream ended;
    ``SILENT``: it says nothing any more; ``HUNG``: it lives and gets nowhere; ``FAILED``: it said
    itself that it cannot go on; ``ASKED``: somebody stops the run, and time is short.
    """

    LOST = "lost_member"
    SILENT = "silent_member"
    HUNG = "hung_member"
    FAILED = "failed_member"
    ASKED = "asked"
    OTHER = "other"


@dataclass(slots=True, kw_only=True)
class Tally:
    """``broken``: attempts; ``recoveries_s``: how long each took, from the break of an epoch to the
    next attempt; ``save_blocked_s``: of saves while more steps waited; ``broke_at_s``: while no
    attempt has begun since.
    """

    broken: Counter[BreakCause] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)
    paused_s: float = 0.0
    saves_done: int = 0
    saves_failed: int = 0
    save_s: float = 0.0
    save_blocked_s: float = 0.0
    saved_bytes: int = 0
    broke_at_s: float | None = None

    def epoch_broke(self, cause: BreakCause, now_s: float, *, attempting: bool) -> None:
        """An epoch is over before its time; ``attempting``: with an attempt under way."""
        if attempting:
            self.broken[cause] += 1
        if self.broke_at_s is None:
            self.broke_at_s = now_s

    def attempt_began(self, now_s: float) -> None:
        """The run goes on."""
        if self.broke_at_s is not None:
            self.recoveries_s.append(now_s - self.broke_at_s)
            self.broke_at_s = None

    def saved(self, num_bytes: int, seconds: float, *, blocked: bool, error: str) -> None:
        """A save is over; ``blocked``: more steps waited for it."""
        self.save_s += seconds
        self.save_blocked_s += seconds if blocked else 0.0
        if error:
            self.saves_failed += 1
        else:
            self.saves_done += 1
            self.saved_bytes += num_bytes

    def copy(self) -> Tally:
        """Returns what there is now."""
        return replace(self, broken=Counter(self.broken), recoveries_s=list(self.recoveries_s))
