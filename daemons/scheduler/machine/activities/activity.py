"""What the scheduler's machine can be busy with: one activity at a time, each a small machine.

An activity belongs to one epoch. It is started, fed with the members' messages of that epoch, and
dropped, whatever it was doing, when the epoch breaks; only what it journaled stays. One in which
nobody gets on is noticed by :class:`HangDetector`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from penstock.daemons.kit.events import LogLine
from penstock.daemons.scheduler.machine.events import Effect, Send
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb


class Activity:
    """Base of all activities.

    ``waiting``: members that owe an answer, until ``deadline_s`` if that is set. ``title``: what
    messages call it. ``started_s``: when it began.
    """

    phase: RunPhase
    title: ClassVar[str]
    answers: ClassVar[Mapping[str, Callable[[Any, str, Any, float], list[Effect]]]] = {}
    """Kind of a member's message -> handler(self, member, message, now_s)."""

    def __init__(self, rules: Rules, mirror: JournalMirror) -> None:
        self.rules = rules
        self.mirror = mirror
        self.started = False
        self.started_s = 0.0
        self.done = False
        self.waiting: set[str] = set()
        self.deadline_s: float | None = None

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Members whose work this activity consists of, as long as they owe some; they have to get
        on (:class:`HangDetector`).
        """
        return ()

    def start(self, now_s: float) -> list[Effect]:
        """Returns the first effects."""
        raise NotImplementedError

    def receive(self, member: str, kind: str, body: Any, now_s: float) -> list[Effect]:
        """Hear a message of the present epoch; kinds that mean nothing here are ignored."""
        handler = self.answers.get(kind)
        return [] if handler is None else handler(self, member, body, now_s)

    def answered(self, member: str) -> bool:
        """Tick a member off; whether it was the last that owed an answer."""
        if member not in self.waiting:
            return False
        self.waiting.discard(member)
        return not self.waiting


def send_all(members: Iterable[str], message: pb.SchedulerMessage) -> list[Effect]:
    """Returns the effects that send one message to several members."""
    return [Send(member=member, message=message) for member in members]


def with_cause(effect: Effect, cause: str) -> Effect:
    """Returns the effect, naming the failure: of what is said or ordered while a run recovers."""
    if isinstance(effect, LogLine):
        return replace(effect, cause=cause)
    if isinstance(effect, Send) and effect.message.HasField("fence"):
        effect.message.fence.cause = cause
    return effect


MAX_IN_A_ROW = 3
"""So many attempts (or evaluations) without an end in between end the run."""

TIMES_LONGEST = 4.0
"""No attempt is given less than this, times what the longest so far took."""

TIMES_IN_ALL = 100.0
"""An activity in which somebody always gets on is given so many times what a standstill is."""


@dataclass(frozen=True, slots=True)
class _Report:
    """The last heartbeat of a member, and since when its progress is what it says."""

    beat: pb.Heartbeat
    since_s: float


class HangDetector:
    """When somebody got on last, and what members say they are at.

    An attempt, an evaluation, a save or a restore in which nobody gets on for long enough is broken
    off. *Getting on* is any answer, and any change of the progress that heartbeats carry, of any
    member; so slow work is not taken for a hang, as long as it ends within
    :data:`TIMES_IN_ALL` such times: nothing goes round in circles for ever.

    ``in_a_row`` counts hangs since an attempt or evaluation came to its end.
    """

    def __init__(self, timeout_s: float) -> None:
        self.in_a_row = 0
        self._timeout_s = timeout_s
        self._longest_s = self._started_s = self._moved_s = 0.0
        self._reports: dict[str, _Report] = {}

    @property
    def allowed_s(self) -> float:
        """How long nobody may get on."""
        return max(self._timeout_s, TIMES_LONGEST * self._longest_s)

    def started(self, now_s: float) -> None:
        """An activity starts."""
        self._started_s = self._moved_s = now_s

    def moved(self, now_s: float) -> None:
        """A member answered, or time passed that does not count."""
        self._moved_s = now_s

    def heard(self, member: str, beat: pb.Heartbeat, now_s: float) -> None:
        """A member's heartbeat."""
        known = self._reports.get(member)
        if known is not None and known.beat.progress == beat.progress:
            self._reports[member] = _Report(beat, known.since_s)
            return
        self._reports[member] = _Report(beat, now_s)
        self.moved(now_s)

    def beat_of(self, member: str) -> pb.Heartbeat | None:
        """Returns a member's last heartbeat, if there was one."""
        report = self._reports.get(member)
        return None if report is None else report.beat

    def paused(self, seconds: float, now_s: float) -> None:
        """The scheduler itself was stopped for so long: that counts for nobody."""
        self._started_s += seconds
        self.moved(now_s)

    def finished(self, seconds: float) -> None:
        """An attempt or evaluation came to its end."""
        self.in_a_row = 0
        self._longest_s = max(self._longest_s, seconds)

    def once_more(self, what: str, said: str) -> str | None:
        """``what`` hung; returns the error that ends the run if it did too often in a row."""
        self.in_a_row += 1
        if self.in_a_row < MAX_IN_A_ROW:
            return None
        return (
            f"{what} hung {self.in_a_row} times in a row, the last time {said}; look at logs/ and"
            " at that machine, or, if a single instruction takes that long, raise"
            f" cluster.attempt_timeout_s = {self._timeout_s:g}"
        )

    def still_s(self, now_s: float) -> float:
        """Returns for how long nobody has got on."""
        return max(0.0, now_s - self._moved_s)

    def suspected(self, now_s: float) -> bool:
        """Whether nobody has got on for long enough to look for who is to blame, or it has taken
        too long in all.
        """
        return self.still_s(now_s) > self.allowed_s or self._endless(now_s)

    def overdue(self, unfinished: Sequence[str], now_s: float) -> dict[str, str]:
        """Returns which of the members that owe an answer to give up now, and why.

        Members that wait for others are not to blame, unless all do: then nobody knows.
        """
        if not self.suspected(now_s):
            return {}
        suspects = [name for name in unfinished if not self._waits(name)]
        return {name: self._complaint(name, now_s) for name in suspects or unfinished}

    def stuck(self, unfinished: Sequence[str], now_s: float) -> dict[str, str]:
        """A member's wait ran out: returns who of those that owe an answer may be why, and how long
        each has not got on, though others may. Members that wait are not to blame, unless all wait
        that have not got on: a save for a sweep, which waits for that save.
        """
        reports = {name: self._reports.get(name) for name in unfinished}
        still = [
            name
            for name, report in reports.items()
            if report is not None and now_s - report.since_s > self._timeout_s
        ]
        suspects = [name for name in still if not self._waits(name)]
        return {name: self._complaint(name, now_s) for name in suspects or still}

    def _endless(self, now_s: float) -> bool:
        return now_s - self._started_s > TIMES_IN_ALL * self.allowed_s

    def _waits(self, name: str) -> bool:
        report = self._reports.get(name)
        return report is not None and report.beat.waiting

    def _complaint(self, name: str, now_s: float) -> str:
        report = self._reports.get(name)
        since_s = self._started_s if report is None else max(report.since_s, self._started_s)
        activity = "" if report is None else report.beat.activity
        if self._endless(now_s):
            took_s = now_s - self._started_s
            return f"no end after {took_s:.0f} s: {activity or 'nothing is under way'}"
        return f"no progress for {now_s - since_s:.1f} s: {activity or 'nothing is under way'}"
