"""The loop of a memoryd: orders, answers of jobs and stop signals go through the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.daemons.memory.effects import MemoryEffects
from penstock.daemons.memory.machine.events import (
    BeginOrdered,
    DrainOrdered,
    Event,
    RefusedByScheduler,
    RestoreOrdered,
    SaveOrdered,
    ShutdownOrdered,
    StopAsked,
)
from penstock.daemons.memory.machine.state import MemoryState
from penstock.daemons.memory.server import BlockServer
from penstock.protocol.errors import PenstockError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.stopping import StopSignal

IDLE_POLL_S = 0.1
BUSY_POLL_S = 0.005
"""While a job runs its answer is looked for this often."""

_log = logging.getLogger(__name__)

_MESSAGES: dict[str, Callable[[Any], Event]] = {
    "drain": lambda m: DrainOrdered(epoch=m.epoch),
    "restore": lambda m: RestoreOrdered(
        epoch=m.epoch, incarnation=m.incarnation, source=m.source, version=m.version
    ),
    "begin": lambda m: BeginOrdered(epoch=m.epoch),
    "save": lambda m: SaveOrdered(epoch=m.epoch, version=m.version, directory=m.directory),
    "shutdown": lambda m: ShutdownOrdered(keep_memory=m.keep_memory, reason=m.reason),
    "refused": lambda m: RefusedByScheduler(reason=m.reason),
}


class Receiver(Protocol):
    """The receiving half of :class:`penstock.protocol.wire.member.MemberLink`."""

    def receive(self, timeout_s: float | None) -> pb.SchedulerMessage | None:
        """The next message, or None after ``timeout_s`` seconds."""


class MemoryService:
    """Runs one memoryd until it is to end; :meth:`run` returns the exit code."""

    def __init__(
        self,
        *,
        state: MemoryState,
        effects: MemoryEffects,
        link: Receiver,
        server: BlockServer,
        stop: StopSignal,
    ) -> None:
        self._state = state
        self._effects = effects
        self._link = link
        self._server = server
        self._stop = stop
        self._stop_seen = False

    def run(self) -> int:
        """Serve until Shutdown, refusal, a fatal error or a stop signal.

        Raises:
            PenstockError: the block server failed.
        """
        while self._effects.exit_code is None:
            if self._server.failure is not None:
                raise PenstockError(
                    f"block server ended: {self._server.failure!r}"
                ) from self._server.failure
            for event in self._events():
                for effect in self._state.handle(event):
                    self._effects.perform(effect)
        return self._effects.exit_code

    def _events(self) -> Iterator[Event]:
        message = self._link.receive(BUSY_POLL_S if self._effects.jobs.running else IDLE_POLL_S)
        answer = self._effects.jobs.answer()
        if answer is not None:
            yield answer
        if message is not None:
            event = _event(message)
            if event is not None:
                yield event
        if self._stop.is_set and not self._stop_seen:
            self._stop_seen = True
            yield StopAsked()


def _event(message: pb.SchedulerMessage) -> Event | None:
    """None for what concerns other members only."""
    kind = message.WhichOneof("body")
    build = _MESSAGES.get(kind or "")
    return None if build is None else build(getattr(message, kind or ""))
