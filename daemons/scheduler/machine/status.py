"""What ``penstock status`` shows: the machine's state as a message, with what happened lately:
losses, saves, pauses. (Steps are not among it: ``metrics.jsonl`` has a line of each.) Nothing is
decided by what is kept for this, and a scheduler that is replaced begins anew. So does what is
counted for metrics (:class:`Tally`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from penstock.daemons.scheduler.machine.activities.activity import Activity, HangDetector
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
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


class Chronicle:
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
class Tally:
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

    def copy(self) -> Tally:
        """Returns what there is now."""
        return replace(self, broken=Counter(self.broken), recoveries_s=list(self.recoveries_s))


class Observable(Protocol):
    """The parts of :class:`~penstock.daemons.scheduler.machine.machine.Machine` that are shown."""

    rules: Rules
    mirror: JournalMirror
    members: Membership
    activity: Activity | None
    live: bool
    message: str
    chronicle: Chronicle
    hangs: HangDetector
    reports: Mapping[str, pb.AttemptDone]

    tally: Tally

    @property
    def saving_version(self) -> int:
        """The version that is being saved; 0 if none is."""

    @property
    def attempt_seconds(self) -> Sequence[float]:
        """How long the last attempts took."""

    @property
    def phase(self) -> RunPhase:
        """What the run is doing."""

    @property
    def pausing(self) -> bool:
        """Whether it is paused, or will be."""


def status_reply(machine: Observable, now_s: float) -> pb.StatusReply:
    """Returns the answer to a Status call."""
    rules, mirror, activity = machine.rules, machine.mirror, machine.activity
    consumed = 0 if mirror.position is None else mirror.position.data_position
    left = max(0, rules.config.train.steps - mirror.version) * rules.config.train.global_batch
    return pb.StatusReply(
        run_id=rules.run_id,
        run_name=rules.config.run.name,
        phase=machine.phase.value,
        epoch=mirror.epoch,
        version=mirror.version,
        attempt=mirror.next_attempt - 1,
        steps=rules.config.train.steps,
        last_metrics_json=mirror.last_metrics_json,
        members=_members(machine, now_s),
        message=_explanation(machine),
        eta_seconds=_eta_s(machine),
        plan_scheme=rules.plan_scheme,
        saved_version=mirror.saved_version,
        has_saved=mirror.saved is not None,
        happenings=machine.chronicle.messages(now_s),
        pausing=machine.pausing,
        saving_version=machine.saving_version,
        phase_seconds=now_s - activity.started_s if activity and activity.started else 0.0,
        data_epoch=rules.data_epochs(consumed) or 0.0,
        data_epochs=rules.data_epochs(consumed + left) or 0.0,
    )


def _members(machine: Observable, now_s: float) -> list[pb.MemberStatus]:
    """Returns who is there, and what each of them is at."""
    members = machine.members.status(now_s, machine.live)
    for member in members:
        beat, report = machine.hangs.beat_of(member.member), machine.reports.get(member.member)
        if beat is not None and member.state in ("joining", "ready"):
            member.doing.CopyFrom(beat)
        if report is not None:
            member.report.CopyFrom(report)
        member.blocks_missing = machine.mirror.blocks_missing.get(member.member, 0)
    return members


def _explanation(machine: Observable) -> str:
    """Returns why it waits, or how the last epoch or the run ended."""
    if machine.live or machine.activity is not None:
        return machine.message
    waits = [f"waiting until {name} is dead" for name in machine.members.fencing]
    waits += [f"waiting for {name}" for name in machine.members.missing]
    return "; ".join([machine.message, *waits] if machine.message else waits)


def _eta_s(machine: Observable) -> float:
    """Returns the seconds to the last step at the pace of the last attempts; negative: unknown."""
    seconds = step_seconds(machine)
    if seconds is None:
        return -1.0
    return max(0, machine.rules.config.train.steps - machine.mirror.version) * seconds


def step_seconds(machine: Observable) -> float | None:
    """Returns the mean of the last attempts' seconds; None before the first."""
    if not machine.attempt_seconds:
        return None
    return sum(machine.attempt_seconds) / len(machine.attempt_seconds)
