"""The last events of a run, and its counters. No decision depends on them. A restarted scheduler
starts with none.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock.protocol.generated import scheduler_pb2 as pb

KEPT = 24
"""Events that a status shows."""


class Kind(StrEnum):
    """Kind of a :class:`Happening`. The kind gives ``seconds`` and ``text`` their meaning."""

    BEGAN = "began"
    """The first epoch of this scheduler began."""
    BROKEN = "broken"
    """An epoch broke. ``text``: the reason. ``seconds``: time until the next epoch. After a
    restore, ``step`` is the restored step, and ``steps_lost`` the number of lost later steps.
    """
    SAVED = "saved"
    """A save is done. ``text``: its directory. ``seconds``: its duration."""
    SAVE_FAILED = "save failed"
    """A save failed. ``text``: the reason."""
    PAUSED = "paused"
    RESUMED = "resumed"
    STOPPING = "stopping"


@dataclass(slots=True, kw_only=True)
class Happening:
    """One event of the run, at ``at_s`` of the machine's clock, when ``step`` was committed."""

    number: int
    at_s: float
    kind: Kind
    step: int
    seconds: float = 0.0
    text: str = ""
    steps_lost: int = 0
    cause: str = ""


class EventHistory:
    """The last :data:`KEPT` events of the run."""

    def __init__(self) -> None:
        self._kept: deque[Happening] = deque(maxlen=KEPT)
        self._number = 0
        self._broken: Happening | None = None

    def add(
        self, kind: Kind, step: int, now_s: float, *, seconds: float = 0.0, text: str = ""
    ) -> Happening:
        """Adds an event that took ``seconds`` and ended now."""
        self._number += 1
        happening = Happening(
            number=self._number, at_s=now_s, kind=kind, step=step, seconds=seconds, text=text
        )
        self._kept.append(happening)
        return happening

    def broke(self, step: int, why: str, now_s: float, cause: str) -> None:
        """Adds a broken epoch, unless the epoch before it has broken and none has begun since: the
        first reason counts. ``cause``: name of the failure in logs.
        """
        if self._broken is None:
            self._broken = self.add(Kind.BROKEN, step, now_s, text=why)
            self._broken.cause = cause

    def died(self, member: str, death: str) -> None:
        """Adds the cause of death of the member that broke the last epoch."""
        if self._broken is not None and self._broken.text == f"{member} was lost":
            self._broken.text += f" ({death.removeprefix('was ')})"

    def lives(self, step: int, now_s: float) -> None:
        """Completes the entry of the broken epoch: an epoch begins."""
        if self._broken is not None:
            self._broken.seconds = now_s - self._broken.at_s
            self._broken.steps_lost = max(0, self._broken.step - step)
            self._broken.step = step
            self._broken = None
        elif not self._number:
            self.add(Kind.BEGAN, step, now_s)

    def messages(self, now_s: float) -> list[pb.Happening]:
        """Returns all events for a status, the newest last."""
        return [
            pb.Happening(
                number=kept.number,
                age_seconds=max(0.0, now_s - kept.at_s),
                kind=kept.kind,
                step=kept.step,
                seconds=kept.seconds,
                text=kept.text,
                steps_lost=kept.steps_lost,
                cause=kept.cause,
            )
            for kept in self._kept
        ]


class BreakCause(StrEnum):
    """Reason of an attempt that was dropped undecided."""

    LOST = "lost_member"
    """A process died, its stream ended, or a connection between two processes ended."""
    SILENT = "silent_member"
    """A member sent no heartbeat."""
    HUNG = "hung_member"
    """A member sent heartbeats and made no progress."""
    FAILED = "failed_member"
    """A member reported that it cannot go on."""
    ASKED = "asked"
    """The run was stopped, and the time was short."""
    OTHER = "other"


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counters since the start of this scheduler. The machine adds, the metrics read."""

    broken: Counter[BreakCause] = field(default_factory=Counter)
    """Dropped attempts by reason."""
    recoveries_s: list[float] = field(default_factory=list)
    """Seconds of each recovery, from the break of an epoch to the next attempt."""
    paused_s: float = 0.0
    saves_done: int = 0
    saves_failed: int = 0
    save_s: float = 0.0
    save_blocked_s: float = 0.0
    """Seconds that steps waited for saves."""
    saved_bytes: int = 0
    broke_at_s: float | None = None
    """Time of the last break without an attempt since; None otherwise."""

    def epoch_broke(self, cause: BreakCause, now_s: float, *, attempting: bool) -> None:
        """Counts a broken epoch. ``attempting``: an attempt was under way."""
        if attempting:
            self.broken[cause] += 1
        if self.broke_at_s is None:
            self.broke_at_s = now_s

    def attempt_began(self, now_s: float) -> None:
        """Counts the recovery, if one ends with this attempt."""
        if self.broke_at_s is not None:
            self.recoveries_s.append(now_s - self.broke_at_s)
            self.broke_at_s = None

    def saved(self, num_bytes: int, seconds: float, *, error: str) -> None:
        """Counts a save that is over."""
        self.save_s += seconds
        if error:
            self.saves_failed += 1
        else:
            self.saves_done += 1
            self.saved_bytes += num_bytes

    def copy(self) -> Counters:
        """Returns a copy of the present values."""
        return replace(self, broken=Counter(self.broken), recoveries_s=list(self.recoveries_s))
