"""The last events of a run, and its counters. No decision depends on them. A restarted scheduler
starts with none.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock.protocol.generated import scheduler_pb2 as pb

KEPT = 24


class Kind(StrEnum):
    """What happened; it says what ``seconds`` and ``text`` of a :class:`Happening` are.

    ``BEGAN``: the first epoch of this scheduler. ``BROKEN``: all go back to the committed step;
    ``text`` is why, ``seconds`` until attempts went on. Where memory had to be filled from a saved
    state, ``step`` is that of the state in the end, and ``steps_lost`` how many were committed
    after it. ``SAVED``: in the directory ``text``.
    ``SAVE_FAILED``: why. ``PAUSED``, ``RESUMED``, ``STOPPING``: on whose request.
    """

    BEGAN = "began"
    BROKEN = "broken"
    SAVED = "saved"
    SAVE_FAILED = "save failed"
    PAUSED = "paused"
    RESUMED = "resumed"
    STOPPING = "stopping"


@dataclass(slots=True, kw_only=True)
class Happening:
    """One of them, at ``at_s`` of the machine's clock, when ``step`` was committed."""

    number: int
    at_s: float
    kind: Kind
    step: int
    seconds: float = 0.0
    text: str = ""
    steps_lost: int = 0
    cause: str = ""


class EventHistory:
    """The last :data:`KEPT` happenings."""

    def __init__(self) -> None:
        self._kept: deque[Happening] = deque(maxlen=KEPT)
        self._number = 0
        self._broken: Happening | None = None

    def add(
        self, kind: Kind, step: int, now_s: float, *, seconds: float = 0.0, text: str = ""
    ) -> Happening:
        """Notes what happened just now; ``seconds`` is how long it took."""
        self._number += 1
        happening = Happening(
            number=self._number, at_s=now_s, kind=kind, step=step, seconds=seconds, text=text
        )
        self._kept.append(happening)
        return happening

    def broke(self, step: int, why: str, now_s: float, cause: str) -> None:
        """An epoch was broken. What breaks the next one before it lives is of the same happening:
        the reason that came first counts. ``cause`` is what logs call it.
        """
        if self._broken is None:
            self._broken = self.add(Kind.BROKEN, step, now_s, text=why)
            self._broken.cause = cause

    def died(self, member: str, death: str) -> None:
        """It is known how a member died by whose loss an epoch was broken."""
        if self._broken is not None and self._broken.text == f"{member} was lost":
            self._broken.text += f" ({death.removeprefix('was ')})"

    def lives(self, step: int, now_s: float) -> None:
        """An epoch begins."""
        if self._broken is not None:
            self._broken.seconds = now_s - self._broken.at_s
            self._broken.steps_lost = max(0, self._broken.step - step)
            self._broken.step = step
            self._broken = None
        elif not self._number:
            self.add(Kind.BEGAN, step, now_s)

    def messages(self, now_s: float) -> list[pb.Happening]:
        """For a status, the latest last."""
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
    """Why an attempt was dropped undecided. ``LOST``: a process died, its stream ended, or a
    connection between two of them did, which of a death is often the first that is known;
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
class Counters:
    """``broken``: attempts; ``recoveries_s``: how long each took, from the break of an epoch to the
    next attempt; ``save_blocked_s``: how long steps waited for saves; ``broke_at_s``: while no
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

    def saved(self, num_bytes: int, seconds: float, *, error: str) -> None:
        """A save is over."""
        self.save_s += seconds
        if error:
            self.saves_failed += 1
        else:
            self.saves_done += 1
            self.saved_bytes += num_bytes

    def copy(self) -> Counters:
        """Returns what there is now."""
        return replace(self, broken=Counter(self.broken), recoveries_s=list(self.recoveries_s))
