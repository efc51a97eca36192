"""Who hangs: members that send heartbeats and do not get on.

A process that dies or stops is noticed by its stream and its heartbeats. One whose heartbeats go on
while its work is stuck (in a driver, a lock, a file system) is noticed here: an attempt, an
evaluation, a save or a restore in which nobody gets on for long enough is broken off. *Getting on*
is any answer, and any change of the progress that heartbeats carry, of any member; so slow work is
never taken for a hang, however long it takes in all. Not noticed is a loader of initial weights
that hangs: its memoryd only knows that the process is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.protocol.generated import scheduler_pb2 as pb

MAX_IN_A_ROW = 3
"""So many attempts (or evaluations) without an end in between end the run."""

TIMES_LONGEST = 4.0
"""No attempt is given less than this, times what the longest so far took."""


@dataclass(frozen=True, slots=True)
class _Report:
    """The last heartbeat of a member, and since when its progress is what it says."""

    beat: pb.Heartbeat
    since_s: float


class Hangs:
    """When somebody got on last, and what members say they are at. ``in_a_row``: hangs since an
    attempt or evaluation came to its end.
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

    def finished(self, seconds: float) -> None:
        """An attempt or evaluation came to its end."""
        self.in_a_row = 0
        self._longest_s = max(self._longest_s, seconds)

    def overdue(self, unfinished: Sequence[str], now_s: float) -> dict[str, str]:
        """Of the members that owe an answer, those to give up now, and why.

        Members that wait for others are not to blame, unless all do: then nobody knows.
        """
        if now_s - self._moved_s <= self.allowed_s:
            return {}
        suspects = [name for name in unfinished if not self._waits(name)]
        return {name: self._complaint(name, now_s) for name in suspects or unfinished}

    def _waits(self, name: str) -> bool:
        report = self._reports.get(name)
        return report is not None and report.beat.waiting

    def _complaint(self, name: str, now_s: float) -> str:
        report = self._reports.get(name)
        since_s = self._started_s if report is None else max(report.since_s, self._started_s)
        activity = "" if report is None else report.beat.activity
        return f"no progress for {now_s - since_s:.1f} s: {activity or 'nothing is under way'}"
