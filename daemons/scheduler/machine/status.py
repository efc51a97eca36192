"""Builds the reply to ``penstock status`` from the machine's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.daemons.scheduler.machine.activities.activity import Activity, HangDetector
from penstock.daemons.scheduler.machine.activities.saves import Saves
from penstock.daemons.scheduler.machine.history import Counters, EventHistory
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.requests import Requests
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.daemons.scheduler.machine.states import MemberState
from penstock.protocol.generated import scheduler_pb2 as pb


class Observable(Protocol):
    """The parts of :class:`~penstock.daemons.scheduler.machine.machine.SchedulerMachine` that a
    status and the metrics show. The machine documents them.
    """

    rules: Rules
    mirror: JournalMirror
    members: Membership
    activity: Activity | None
    live: bool
    message: str
    history: EventHistory
    counters: Counters
    saves: Saves
    requests: Requests
    hangs: HangDetector
    reports: Mapping[str, pb.AttemptDone]

    @property
    def attempt_seconds(self) -> Sequence[float]:
        """Seconds of each of the last attempts."""

    @property
    def phase(self) -> RunPhase:
        """Phase of the run."""


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
        happenings=machine.history.messages(now_s),
        pausing=machine.requests.paused,
        saving_version=machine.saves.saved_version or 0,
        phase_seconds=now_s - activity.started_s if activity and activity.started else 0.0,
        data_epoch=rules.data_epochs(consumed) or 0.0,
        data_epochs=rules.data_epochs(consumed + left) or 0.0,
    )


def _members(machine: Observable, now_s: float) -> list[pb.MemberStatus]:
    """Returns the state of each member, with its activity and its last report."""
    members = machine.members.status(now_s, machine.live)
    for member in members:
        beat, report = machine.hangs.beat_of(member.member), machine.reports.get(member.member)
        if beat is not None and member.state in (MemberState.JOINING, MemberState.READY):
            member.doing.CopyFrom(beat)
        if report is not None:
            member.report.CopyFrom(report)
        member.blocks_missing = machine.mirror.blocks_missing.get(member.member, 0)
    return members


def _explanation(machine: Observable) -> str:
    """Returns the reason of a wait, or of the end of the last epoch or of the run."""
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
