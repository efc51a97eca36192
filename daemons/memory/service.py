"""The loop of a memoryd: orders, answers of jobs and stop signals go through the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.daemons.kit.events import StopAsked
from penstock.daemons.kit.loop import Loop
from penstock.daemons.kit.messages import COMMON_EVENTS, event_of, record_of
from penstock.daemons.memory.effects import MemoryEffects
from penstock.daemons.memory.machine.events import Event, ReplicaSource, RestoreAsked, SaveAsked
from penstock.daemons.memory.machine.machine import MemoryMachine
from penstock.daemons.memory.server import BlockServer
from penstock.host.errors import PenstockError
from penstock.host.stopping import StopSignal
from penstock.protocol.generated import scheduler_pb2 as pb

IDLE_POLL_S = 0.1
BUSY_POLL_S = 0.005
"""Seconds between checks for a running job's answer."""

_log = logging.getLogger(__name__)


def _replica_of(message: pb.Restore) -> ReplicaSource | None:
    if not message.partner:
        return None
    record, generation = record_of(message.record), message.generation
    return ReplicaSource(address=message.partner, record=record, generation=generation)


_EVENTS: dict[str, Callable[[Any], Event]] = {
    **COMMON_EVENTS,
    "restore": lambda m: RestoreAsked(
        epoch=m.epoch,
        incarnation=m.incarnation,
        source=m.source,
        version=m.version,
        replica=_replica_of(m),
    ),
    "save": lambda m: SaveAsked(
        epoch=m.epoch,
        number=m.number,
        version=m.version,
        directory=m.directory,
        weights_only=m.weights_only,
    ),
}


class Receiver(Protocol):
    """The receiving half of :class:`penstock.protocol.wire.member.MemberLink`."""

    def receive(self, timeout_s: float | None) -> pb.SchedulerMessage | None:
        """Returns the next message, or None after ``timeout_s`` seconds."""


class MemoryService:
    """Runs one memoryd until it is to end; :meth:`run` returns the exit code."""

    def __init__(
        self,
        *,
        machine: MemoryMachine,
        effects: MemoryEffects,
        link: Receiver,
        server: BlockServer,
        stop: StopSignal,
    ) -> None:
        self._loop = Loop(machine, effects)
        self._jobs = effects.jobs
        self._link = link
        self._server = server
        self._stop = stop
        self._stop_seen = False

    def run(self) -> int:
        """Serves until Shutdown, refusal, a fatal error or a stop signal.

        Raises:
            PenstockError: the block server failed.
        """
        while self._loop.exit is None:
            if self._server.failure is not None:
                raise PenstockError(
                    f"block server ended: {self._server.failure!r}"
                ) from self._server.failure
            for event in self._events():
                self._loop.feed(event)
        return self._loop.exit.code

    def _events(self) -> Iterator[Event]:
        message = self._link.receive(BUSY_POLL_S if self._jobs.running else IDLE_POLL_S)
        answer = self._jobs.answer()
        if answer is not None:
            yield answer
        event = None if message is None else event_of(message, _EVENTS)
        if event is not None:
            yield event
        if self._stop.is_set and not self._stop_seen:
            self._stop_seen = True
            yield StopAsked()
