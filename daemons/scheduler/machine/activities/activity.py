"""Activities of the scheduler's machine: one at a time, each a small machine of its own.

An activity belongs to one epoch. It starts, receives the members' messages of that epoch, and is
dropped when the epoch breaks. Only journaled results stay. :class:`HangDetector` notices an
activity without progress.
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
    """Base of all activities."""

    phase: RunPhase
    """Phase that a status shows. Written by the activity."""
    title: ClassVar[str]
    """Name of the activity in messages."""
    answers: ClassVar[Mapping[str, Callable[[Any, str, Any, float], list[Effect]]]] = {}
    """Handlers by kind of a member's message: handler(self, member, message, now_s)."""

    def __init__(self, rules: Rules, mirror: JournalMirror) -> None:
        self.rules = rules
        self.mirror = mirror
        self.started = False
        """True once the machine has called :meth:`start`. Written by the machine."""
        self.started_s = 0.0
        """Time of the start, moved after a pause of this process. Written by the machine."""
        self.done = False
        """True once the activity is over. Written by the activity."""
        self.waiting: set[str] = set()
        """Members that owe an answer. Written by the activity."""
        self.deadline_s: float | None = None
        """Time at which ``waiting`` members are lost; None: :class:`HangDetector` decides."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Members that owe work to this activity, and must make progress
        (:class:`HangDetector`).
        """
        return ()

    def start(self, now_s: float) -> list[Effect]:
        """Returns the first effects."""
        raise NotImplementedError

    def receive(self, member: str, kind: str, body: Any, now_s: float) -> list[Effect]:
        """Handles a message of the present epoch. Kinds without a handler are ignored."""
        handler = self.answers.get(kind)
        return [] if handler is None else handler(self, member, body, now_s)

    def answered(self, member: str) -> bool:
        """Marks a member as answered; returns whether it was the last of ``waiting``."""
        if member not in self.waiting:
            return False
        self.waiting.discard(member)
        return not self.waiting


def send_all(members: Iterable[str], message: pb.SchedulerMessage) -> list[Effect]:
    """Returns the effects that send one message to several members."""
    return [Send(member=member, message=message) for member in members]


def with_cause(effect: Effect, cause: str) -> Effect:
    """Returns the effect with the name of the failure, if it is a log line or a fence."""
    if isinstance(effect, LogLine):
        return replace(effect, cause=cause)
    if isinstance(effect, Send) and effect.message.HasField("fence"):
        effect.message.fence.cause = cause
    return effect


MAX_IN_A_ROW = 3
"""Hangs in a row, without a finished attempt or evaluation between them, that end the run."""

TIMES_LONGEST = 4.0
"""Factor of the longest attempt so far: an attempt may stand still for at least that time."""

TIMES_IN_ALL = 100.0
"""Factor of the allowed standstill: limit of an activity in which some member progresses."""


@dataclass(frozen=True, slots=True)
class _Report:
    """The last heartbeat of a member, and the time since which its progress is unchanged."""

    beat: pb.Heartbeat
    since_s: float


class HangDetector:
    """Detects attempts, evaluations, saves and restores without progress.

    Progress is any answer of any member, and any change of the progress in its heartbeats. So slow
    work is no hang while it ends within :data:`TIMES_IN_ALL` allowed standstills. That limit ends
    work that progresses for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self.in_a_row = 0
        """Hangs since the last finished attempt or evaluation."""
        self._timeout_s = timeout_s
        self._longest_s = self._started_s = self._moved_s = 0.0
        """Seconds of the longest attempt; times of the activity's start and of the last progress.
        """
        self._reports: dict[str, _Report] = {}
        """The last heartbeat of each member."""

    @property
    def allowed_s(self) -> float:
        """Seconds that all members may be without progress."""
        return max(self._timeout_s, TIMES_LONGEST * self._longest_s)

    def started(self, now_s: float) -> None:
        """Notes the start of an activity."""
        self._started_s = self._moved_s = now_s

    def moved(self, now_s: float) -> None:
        """Notes progress: an answer of a member, or the end of a pause of this process."""
        self._moved_s = now_s

    def heard(self, member: str, beat: pb.Heartbeat, now_s: float) -> None:
        """Notes a member's heartbeat; a changed progress counts as progress."""
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
        """Notes that this process itself was stopped for ``seconds``, which count for no member."""
        self._started_s += seconds
        self.moved(now_s)

    def finished(self, seconds: float) -> None:
        """Notes the end of an attempt or evaluation that took ``seconds``."""
        self.in_a_row = 0
        self._longest_s = max(self._longest_s, seconds)

    def once_more(self, title: str, reasons: str) -> str | None:
        """Counts a hang; returns the error that ends the run after too many in a row."""
        self.in_a_row += 1
        if self.in_a_row < MAX_IN_A_ROW:
            return None
        return (
            f"{title} hung {self.in_a_row} times in a row, the last time {reasons}; check logs/ and"
            " that machine, or, if a single instruction takes that long, raise"
            f" cluster.attempt_timeout_s = {self._timeout_s:g}"
        )

    def still_s(self, now_s: float) -> float:
        """Returns the seconds since the last progress of any member."""
        return max(0.0, now_s - self._moved_s)

    def suspected(self, now_s: float) -> bool:
        """Returns whether the standstill exceeds its limit, or the activity its total limit."""
        return self.still_s(now_s) > self.allowed_s or self._endless(now_s)

    def overdue(self, unfinished: Sequence[str], now_s: float) -> dict[str, str]:
        """Returns the hung members among those that owe an answer, mapped to reasons.

        Members that wait for others are not to blame. If all of them wait, all count as hung.
        """
        if not self.suspected(now_s):
            return {}
        suspects = [name for name in unfinished if not self._waits(name)]
        return {name: self._complaint(name, now_s) for name in suspects or unfinished}

    def stuck(self, unfinished: Sequence[str], now_s: float) -> dict[str, str]:
        """Returns the culprits of a member's timeout among those that owe an answer, with reasons.

        A culprit has made no progress for the timeout, though other members may have. Waiting
        members are not to blame, unless all members without progress wait: a save for a sweep,
        which waits for that save.
        """
        reports = {name: self._reports.get(name) for name in unfinished}
        still = [
            name
            for name, report in reports.items()
            if report is not None and now_s - report.since_s > self._timeout_s
        ]
        suspects = [name for name in still if not self._waits(name)]
        return {name: self._complaint(name, now_s) for name in suspects or still}

    def held_back(self, savers: Iterable[str], stuck: Iterable[str]) -> bool:
        """Returns whether the members that are :meth:`stuck` may wait for a save: one of
        ``savers`` works and makes progress, and every stuck member waits. A sweep waits for a save
        without a timeout, and workers wait for the sweep.
        """
        names = set(stuck)
        works = any(
            name in self._reports and name not in names and not self._waits(name) for name in savers
        )
        return works and all(map(self._waits, names))

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
