"""mirrord's loop: what arrives in the inbox becomes events, the machine's effects are done."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.daemons.kit.events import EffectFailed, Exit, StopAsked
from penstock.daemons.kit.loop import Loop
from penstock.daemons.kit.messages import COMMON_EVENTS, event_of, record_of
from penstock.daemons.memory.server import BlockServer
from penstock.daemons.mirror.effects import MirrorEffects
from penstock.daemons.mirror.machine.events import Event, FollowAsked, PresentAsked, Seeded
from penstock.daemons.mirror.machine.machine import MirrorMachine
from penstock.daemons.mirror.metrics import MirrorMetrics
from penstock.daemons.mirror.seeds import Seeder
from penstock.daemons.optimizer.effects import FinishedSweep, SweepThread
from penstock.daemons.optimizer.inbox import POLL_S, Lost, PullOutcome
from penstock.daemons.optimizer.machine.events import (
    AttemptAsked,
    CommitAsked,
    SkipAsked,
    SweepDone,
)
from penstock.daemons.optimizer.pulls import Puller
from penstock.host import world
from penstock.host.errors import ExitCode, LostMemberError, PenstockError
from penstock.host.stopping import StopSignal
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.names import memoryd_name
from penstock.protocol.wire.member import Doing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """A seed has ended."""

    event: Seeded | EffectFailed
    num_bytes: int


Item = pb.SchedulerMessage | FinishedSweep | PullOutcome | SeedOutcome | Lost
Inbox = queue.SimpleQueue[Item]

EVENTS: dict[str, Callable[[Any], Event]] = {
    **{kind: COMMON_EVENTS[kind] for kind in ("drain", "shutdown", "refused")},
    "begin": lambda m: FollowAsked(epoch=m.epoch, record=record_of(m.record)),
    "settle": lambda m: PresentAsked(epoch=m.epoch, record=record_of(m.record)),
    "run_attempt": lambda m: AttemptAsked(
        epoch=m.epoch,
        attempt=m.attempt,
        base_version=m.base_version,
        loss_scale=m.loss_scale,
        learning_rate=m.learning_rate,
        hold=m.hold,
    ),
    "commit": lambda m: CommitAsked(epoch=m.epoch, record=record_of(m.record)),
    "skip": lambda m: SkipAsked(epoch=m.epoch, attempt=m.attempt),
}
"""Messages that are events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """Parts of the service. ``owner``: the node with the mirrored blocks. ``near``: nearer
    addresses of memoryds than those in Begin.
    """

    run_id: str
    member: str
    owner: str
    near: dict[str, str]
    effects: MirrorEffects
    sweeps: SweepThread
    puller: Puller
    seeder: Seeder
    server: BlockServer
    metrics: MirrorMetrics
    stop: StopSignal


class MirrorService:
    """One mirrord, from its first message to its exit."""

    def __init__(self, *, machine: MirrorMachine, inbox: Inbox, parts: ServiceParts) -> None:
        self._machine = machine
        self._loop = Loop(machine, parts.effects)
        self._inbox = inbox
        self._parts = parts
        self._items = 0
        self._stop_seen = False
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            pb.SchedulerMessage: self._on_message,
            FinishedSweep: self._on_sweep,
            PullOutcome: self._on_pull,
            SeedOutcome: self._on_seed,
            Lost: self._on_lost,
        }

    def run(self) -> None:
        """Serves until the machine exits.

        Raises:
            PenstockError: this process cannot go on; another one may.
        """
        while self._loop.exit is None:
            if self._parts.server.failure is not None:
                failure = self._parts.server.failure
                raise PenstockError(f"block server ended: {failure!r}") from failure
            try:
                item = self._inbox.get(timeout=POLL_S)
            except queue.Empty:
                self._look_for_stop()
                continue
            missing = self._machine.replica.missing
            self._handlers[type(item)](item)
            # What is read from the owner again and again is no progress: it may be that this
            # process receives no commit any more.
            self._items += type(item) is not SeedOutcome or self._machine.replica.missing != missing
        _leave(self._loop.exit)

    def hello(self) -> pb.Hello:
        """Returns how this process introduces itself on every new stream."""
        members = {*self._parts.puller.sources, memoryd_name(self._parts.owner)}
        return pb.Hello(
            run_id=self._parts.run_id,
            member=self._parts.member,
            pid=world.pid(),
            epoch=self._machine.epoch,
            data_endpoint=self._parts.server.endpoint,
            peers=pb.Peers(members=sorted(members)),
        )

    def doing(self) -> Doing:
        """Returns what heartbeats say; called on their thread."""
        running = self._parts.sweeps.running
        activity = f"{running.name} of block {running.block}" if running else ""
        return Doing(
            activity=activity or "waiting for gradients",
            waiting=not activity,
            progress=self._items,
            stuck=self._parts.server.stuck,
        )

    def _on_message(self, message: pb.SchedulerMessage) -> None:
        event = event_of(message, EVENTS)
        if isinstance(event, FollowAsked):
            addresses = {e.member: e.address for e in message.begin.endpoints}
            self._parts.puller.set_addresses({**addresses, **self._parts.near})
            self._parts.seeder.set_address(addresses.get(memoryd_name(self._parts.owner), ""))
            event = replace(
                event,
                bereft=self._parts.puller.blocks_from(message.begin.bereft),
                is_strange=self._parts.member in message.begin.strange,
            )
        if event is not None:
            self._loop.feed(event)

    def _on_sweep(self, finished: FinishedSweep) -> None:
        if isinstance(finished.event, SweepDone):
            self._parts.metrics.settled(finished.event.seconds)
        self._loop.feed(finished.event)

    def _on_pull(self, outcome: PullOutcome) -> None:
        self._parts.metrics.pulled(outcome.num_bytes)
        self._loop.feed(outcome.event)

    def _on_seed(self, outcome: SeedOutcome) -> None:
        self._parts.metrics.seeded(outcome.num_bytes)
        self._loop.feed(outcome.event)

    def _on_lost(self, lost: Lost) -> None:
        raise LostMemberError(f"link to the scheduler: {lost.error}") from lost.error

    def _look_for_stop(self) -> None:
        if self._parts.stop.is_set and not self._stop_seen:
            self._stop_seen = True
            self._loop.feed(StopAsked())


def _leave(end: Exit) -> None:
    if end.code != ExitCode.DONE:
        raise LostMemberError(end.reason)
