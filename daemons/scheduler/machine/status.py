"""What ``penstock status`` shows: the machine's state as a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.daemons.scheduler.machine.activity import Activity
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb


class Observable(Protocol):
    """The parts of :class:`~penstock.daemons.scheduler.machine.machine.Machine` that are shown."""

    rules: Rules
    mirror: JournalMirror
    members: Membership
    activity: Activity | None
    live: bool
    message: str

    @property
    def attempt_seconds(self) -> Sequence[float]:
        """How long the last attempts took."""

    @property
    def phase(self) -> RunPhase:
        """What the run is doing."""


def status_reply(machine: Observable, now_s: float) -> pb.StatusReply:
    """Returns the answer to a Status call."""
    rules, mirror = machine.rules, machine.mirror
    return pb.StatusReply(
        run_id=rules.run_id,
        run_name=rules.config.run.name,
        phase=machine.phase.value,
        epoch=mirror.epoch,
        version=mirror.version,
        attempt=mirror.next_attempt - 1,
        steps=rules.config.train.steps,
        last_metrics_json=mirror.last_metrics_json,
        members=machine.members.status(now_s, machine.live),
        message=_explanation(machine),
        eta_seconds=_eta_s(machine),
        plan_scheme=rules.plan_scheme,
        saved_version=mirror.saved_version,
        has_saved=mirror.saved is not None,
    )


def _explanation(machine: Observable) -> str:
    """Returns why it waits, or how the last epoch or the run ended."""
    if machine.live or machine.activity is not None:
        return machine.message
    waits = [f"waiting until {name} is dead" for name in machine.members.fencing]
    waits += [f"waiting for {name}" for name in machine.members.missing]
    return "; ".join([machine.message, *waits] if machine.message else waits)


def _eta_s(machine: Observable) -> float:
    """Returns the seconds to the last step at the pace of the last attempts; negative: unknown."""
    if not machine.attempt_seconds:
        return -1.0
    left = max(0, machine.rules.config.train.steps - machine.mirror.version)
    return left * sum(machine.attempt_seconds) / len(machine.attempt_seconds)
