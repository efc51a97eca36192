"""Runs optimizerd's loop: turns input into events of the machine, and carries out its effects.

The loop sleeps in one queue that every listening thread fills, so input is handled at once. Only
three actions follow the clock. The stop signal is checked. After a second without input the ready
words are checked, in case a worker's message was lost. During a save memoryd's pins are checked.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.daemons.kit.events import DrainAsked, Exit, ShutdownAsked, StopAsked
from penstock.daemons.kit.loop import Loop
from penstock.daemons.kit.messages import COMMON_EVENTS, event_of, record_of
from penstock.daemons.optimizer.effects import (
    FinishedSweep,
    OptimizerEffects,
    SweepRunner,
    read_facts,
    read_pins,
)
from penstock.daemons.optimizer.inbox import POLL_S, Inbox, Lost, PullOutcome
from penstock.daemons.optimizer.machine.events import (
    AmendAsked,
    AttemptAsked,
    CommitAsked,
    DeviceUpdated,
    Event,
    GradientsReady,
    OwnedBlock,
    PinsSeen,
    Pulled,
    RecoveryAsked,
    SettleAsked,
    SkipAsked,
    SweepDone,
)
from penstock.daemons.optimizer.machine.machine import OptimizerMachine
from penstock.daemons.optimizer.machine.sweeps import Sweep
from penstock.daemons.optimizer.metrics import OptimizerMetrics
from penstock.daemons.optimizer.pulls import Puller
from penstock.host import world
from penstock.host.errors import (
    ExitCode,
    LostMemberError,
    PenstockError,
    StateError,
)
from penstock.host.stopping import StopSignal
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.step import SweepStatus
from penstock.protocol.run.trace import TraceLane, TraceLog, now_s
from penstock.protocol.wire.frames import BlockUpdated, GradientReady
from penstock.protocol.wire.member import Doing
from penstock.shm.control import INVALID_VERSION, ControlView
from penstock.shm.layout import WEIGHT_SLOTS

RESCAN_AFTER_S = 1.0
PIN_POLL_S = 0.002
"""Seconds between checks of the pins while a save reads blocks."""

_log = logging.getLogger(__name__)


EVENTS: dict[str, Callable[[Any], Event]] = {
    **{kind: COMMON_EVENTS[kind] for kind in ("drain", "shutdown", "refused")},
    "run_attempt": lambda m: AttemptAsked(
        epoch=m.epoch,
        attempt=m.attempt,
        base_version=m.base_version,
        loss_scale=m.loss_scale,
        learning_rate=m.learning_rate,
        hold=m.hold,
    ),
    "amend": lambda m: AmendAsked(epoch=m.epoch, attempt=m.attempt, record=record_of(m.record)),
    "commit": lambda m: CommitAsked(epoch=m.epoch, record=record_of(m.record)),
    "skip": lambda m: SkipAsked(epoch=m.epoch, attempt=m.attempt),
    "settle": lambda m: SettleAsked(epoch=m.epoch, version=m.version),
}
"""Messages that are events as they stand; a Begin needs what the memory holds, too."""


_ENDINGS = frozenset({"commit", "skip", "drain"})
"""Messages after which an attempt is over, and its trace is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """Parts of the service; ``main`` makes and closes them. ``is_named``: whether the mapped memory
    still belongs to the node.
    """

    run_id: str
    blocks: tuple[OwnedBlock, ...]
    control: ControlView
    is_named: Callable[[], bool]
    kernels: SweepRunner
    effects: OptimizerEffects
    puller: Puller | None
    metrics: OptimizerMetrics
    stop: StopSignal
    trace: TraceLog


class OptimizerService:
    """One optimizerd, from its first message to its exit."""

    def __init__(self, *, machine: OptimizerMachine, inbox: Inbox, parts: ServiceParts) -> None:
        self._machine = machine
        self._loop = Loop(machine, parts.effects)
        self._inbox = inbox
        self._parts = parts
        self._local = {
            (b.index, k) for b in parts.blocks for k in range(b.contributions) if k not in b.remote
        }
        self._on_devices = {b.index for b in parts.blocks if b.policy.by_worker}
        self._idle_s = 0.0
        self._items = 0
        self._handling = ""
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            pb.SchedulerMessage: self._on_message,
            GradientReady: self._on_gradients,
            BlockUpdated: self._on_block_updated,
            FinishedSweep: self._on_sweep,
            PullOutcome: self._on_pull,
            Lost: self._on_lost,
        }

    def run(self) -> None:
        """Serves until the machine exits.

        Raises:
            PenstockError: the run cannot continue (the scheduler has been informed), or refuses
                this process.
        """
        while self._loop.exit is None:
            self._look_at_pins()
            try:
                item = self._inbox.get(timeout=PIN_POLL_S if self._machine.pins else POLL_S)
            except queue.Empty:
                self._on_quiet()
                continue
            self._idle_s = 0.0
            self._items += 1
            self._handling = type(item).__name__
            self._handlers[type(item)](item)
            self._handling = ""
        self._parts.trace.flush()
        self._leave(self._loop.exit)

    def hello(self, member: str, endpoint: str) -> pb.Hello:
        """Returns how this process introduces itself on every new stream."""
        return pb.Hello(
            run_id=self._parts.run_id,
            member=member,
            pid=world.pid(),
            epoch=self._machine.joined_epoch,
            data_endpoint=endpoint,
            peers=pb.Peers(members=self._parts.puller.sources if self._parts.puller else ()),
        )

    def doing(self, running: Sweep | None) -> Doing:
        """Returns the activity for heartbeats, on their thread: the running sweep, or the event
        being handled. With neither, this process waits for gradients, a save or the scheduler.
        """
        activity = f"{running.name} of block {running.block}" if running else self._handling
        return Doing(
            activity=activity or self._awaited(),
            waiting=not activity,
            progress=self._items,
        )

    def _awaited(self) -> str:
        pins = self._machine.pins
        return f"waiting for a save of blocks {sorted(pins)}" if pins else "waiting for gradients"

    def _feed(self, event: Event) -> None:
        epoch, phase = self._machine.joined_epoch, self._machine.phase
        self._loop.feed(event)
        if (epoch, phase) != (self._machine.joined_epoch, self._machine.phase):
            _log.info(
                "%s in membership %d at version %d",
                self._machine.phase.name.lower(),
                self._machine.joined_epoch,
                self._machine.committed,
            )
        self._parts.metrics.waits(self._machine.waits_for, self._machine.queue_length)

    def _on_message(self, message: pb.SchedulerMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "begin":
            self._on_begin(message.begin)
            return
        event = event_of(message, EVENTS)
        if event is None:
            return  # it concerns other members
        if isinstance(event, ShutdownAsked):
            _log.info("shutdown: %s", event.reason)
        if isinstance(event, DrainAsked) and not self._parts.is_named():
            # It was given back as the run ended, which goes on all the same: with other memory,
            # which a new process maps.
            _log.warning(
                "this node's memory was removed: ending, so that a new process maps the new memory"
            )
            event = StopAsked()
        if isinstance(event, AttemptAsked):  # memoryd had set its pins before this was sent
            self._see_pins(read_pins(self._parts.control, (b.index for b in self._parts.blocks)))
        self._feed(event)
        if kind in _ENDINGS:
            self._parts.trace.flush()

    def _look_at_pins(self) -> None:
        """Reads the pins. Between attempts memoryd only releases pins."""
        if self._machine.pins:
            self._see_pins(read_pins(self._parts.control, self._machine.pins))

    def _see_pins(self, pins: dict[int, int]) -> None:
        if pins != self._machine.pins:
            self._feed(PinsSeen(pins=pins))

    def _on_begin(self, begin: pb.Begin) -> None:
        if self._parts.puller is not None:
            self._parts.puller.set_addresses({e.member: e.address for e in begin.endpoints})
        self._parts.control.mend_sequences(block.index for block in self._parts.blocks)
        facts = read_facts(self._parts.control, self._parts.blocks)
        record = record_of(begin.record)
        self._feed(RecoveryAsked(epoch=begin.epoch, record=record, facts=facts))

    def _on_gradients(self, message: GradientReady) -> None:
        reason = self._why_not(message)
        if reason:
            self._drop(reason, message)
            return
        self._feed(
            GradientsReady(
                epoch=message.epoch,
                attempt=message.attempt,
                block=message.block,
                contribution=message.contribution,
            )
        )

    def _why_not(self, message: GradientReady) -> str:
        """Returns why a message is not believed, or an empty text."""
        if message.run_id != self._parts.run_id:
            return "other_run"
        if (message.block, message.contribution) not in self._local:
            # another node's contribution is pulled, so a message about it is dropped
            return "not_local"
        if not self._is_ready(message):
            return "not_ready"
        return ""

    def _on_block_updated(self, message: BlockUpdated) -> None:
        reason = self._why_no_update(message)
        if reason:
            self._drop(reason, message)
            return
        self._feed(
            DeviceUpdated(
                epoch=message.epoch,
                attempt=message.attempt,
                block=message.block,
                status=SweepStatus(finite=message.finite, sum_squares=message.sum_squares),
                seconds=message.seconds,
            )
        )

    def _why_no_update(self, message: BlockUpdated) -> str:
        """Returns why a message is not believed (the words are not those that UPDATE waits for), or
        an empty text.
        """
        control, block, version = self._parts.control, message.block, message.version
        if message.run_id != self._parts.run_id:
            return "other_run"
        if block not in self._on_devices:
            return "not_on_device"
        if control.state_version(block) != version - 1:
            return "not_settled"
        if control.slot_version(block, version % WEIGHT_SLOTS) != INVALID_VERSION:
            return "slot_in_use"
        return ""

    def _drop(self, reason: str, message: GradientReady | BlockUpdated) -> None:
        self._parts.metrics.dropped(reason)
        _log.debug("dropped %s: %s", message, reason)

    def _is_ready(self, wanted: GradientReady | GradientsReady) -> bool:
        word = self._parts.control.ready(wanted.block, wanted.contribution)
        return word == (wanted.epoch, wanted.attempt)

    def _on_sweep(self, finished: FinishedSweep) -> None:
        event = finished.event
        attempt = self._machine.attempt
        self._feed(event)
        if isinstance(event, SweepDone):
            text = f"{finished.work.name} {finished.work.block}"
            self._trace(TraceLane.OPTIMIZER, text, attempt, finished.start_s, finished.end_s)
            parameters, num_bytes = self._parts.kernels.moved_by(finished.work)
            self._parts.metrics.sweep_done(finished.work.name, event.seconds, parameters, num_bytes)

    def _on_pull(self, outcome: PullOutcome) -> None:
        self._feed(outcome.event)
        event = outcome.event
        if isinstance(event, Pulled):
            arrived = now_s()
            text = f"{event.block} {event.contribution}"
            self._trace(TraceLane.PULL, text, event.attempt, arrived, arrived)

    def _trace(
        self, lane: TraceLane, text: str, attempt: int, start_s: float, end_s: float
    ) -> None:
        if self._parts.trace.keeps(attempt):
            self._parts.trace.record(lane, text, "train", attempt, start_s, end_s)

    def _on_lost(self, lost: Lost) -> None:
        raise LostMemberError(f"link to the scheduler: {lost.error}") from lost.error

    def _on_quiet(self) -> None:
        if self._parts.stop.is_set:
            self._feed(StopAsked())
        self._idle_s += PIN_POLL_S if self._machine.pins else POLL_S
        if self._idle_s >= RESCAN_AFTER_S:
            self._idle_s = 0.0
            for pair in self._machine.awaited():
                if self._is_ready(pair):
                    _log.warning("no message came for %s", pair)
                    self._feed(pair)

    def _leave(self, end: Exit) -> None:
        if end.code == ExitCode.DONE:
            return
        kinds: dict[int, type[PenstockError]] = {ExitCode.BAD_CONFIG: StateError}
        raise kinds.get(end.code, LostMemberError)(end.reason)
