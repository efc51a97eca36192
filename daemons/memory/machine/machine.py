"""What a memoryd decides: a pure machine, events in, effects out.

::

    JOINING --Drain--> DRAINED --Restore--> RESTORING --Restored--> DRAINED --Begin--> READY
    READY --Save--> SAVING --Saved--> READY
    RESTORING, SAVING --Drain, Shutdown, SIGTERM--> the job is cancelled; what was ordered follows
                                                     when it has answered
    any --Shutdown, Refused, SIGTERM--> ENDED

One job (restore or save) runs at a time, and nothing is acknowledged while one does, so that the
scheduler's barrier means what it says: after ``Drained`` no thread of this process reads or writes
model state. Messages of an older epoch are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.daemons.kit.events import (
    BeginAsked,
    DrainAsked,
    Exit,
    RefusedByScheduler,
    Say,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
)
from penstock.daemons.memory.machine.events import (
    CancelJob,
    Effect,
    Event,
    JobCancelled,
    JobFailed,
    RestoreAsked,
    Restored,
    SaveAsked,
    Saved,
    SendRestored,
    SendSaved,
    StartRestore,
    StartSave,
    UnlinkMemory,
)
from penstock.protocol.errors import ExitCode


class MemoryPhase(StrEnum):
    """See the module's picture."""

    JOINING = "joining"
    DRAINED = "drained"
    RESTORING = "restoring"
    READY = "ready"
    SAVING = "saving"
    ENDED = "ended"


_WORKING = (MemoryPhase.RESTORING, MemoryPhase.SAVING)


@dataclass(slots=True, kw_only=True)
class MemoryMachine:
    """Feed :meth:`handle` with events and carry out what it returns, in order.

    ``epoch``: of the last drain. ``order``: the restore or save under way. ``deferred``: what
    interrupted it and waits for its end.
    """

    epoch: int = 0
    phase: MemoryPhase = MemoryPhase.JOINING
    order: RestoreAsked | SaveAsked | None = None
    deferred: DrainAsked | ShutdownAsked | StopAsked | RefusedByScheduler | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Returns what to do about ``event``; nothing that a memoryd decides depends on time."""
        if self.phase is MemoryPhase.ENDED:
            return [Say(text=f"ignored: {type(event).__name__} after the end")]
        return _HANDLERS[type(event)](self, event)

    def validate(self) -> None:
        """Check that an order is kept exactly while its job runs.

        Raises:
            ValueError: naming phase and order.
        """
        if (self.order is not None) != (self.phase in _WORKING):
            raise ValueError(f"phase {self.phase} with order {self.order}")
        if self.deferred is not None and self.order is None:
            raise ValueError(f"{self.deferred} waits for a job, but none runs")

    def _on_drain(self, event: DrainAsked) -> list[Effect]:
        if event.epoch < self.epoch:
            return [_stale(event, self.epoch)]
        if self.order is not None:
            return self._defer(event)
        self.epoch = event.epoch
        self.phase = MemoryPhase.DRAINED
        return [SendDrained(epoch=event.epoch)]

    def _on_restore(self, event: RestoreAsked) -> list[Effect]:
        if event.epoch != self.epoch or self.phase is not MemoryPhase.DRAINED:
            return [_out_of_order(event, self)]
        self.phase, self.order = MemoryPhase.RESTORING, event
        return [
            StartRestore(incarnation=event.incarnation, source=event.source, version=event.version)
        ]

    def _on_begin(self, event: BeginAsked) -> list[Effect]:
        if event.epoch != self.epoch or self.phase not in (MemoryPhase.DRAINED, MemoryPhase.READY):
            return [_out_of_order(event, self)]
        self.phase = MemoryPhase.READY
        return [SendReady(epoch=event.epoch)]

    def _on_save(self, event: SaveAsked) -> list[Effect]:
        if event.epoch != self.epoch or self.phase is not MemoryPhase.READY:
            return [_out_of_order(event, self)]
        self.phase, self.order = MemoryPhase.SAVING, event
        return [StartSave(version=event.version, directory=event.directory)]

    def _on_end(self, event: ShutdownAsked | StopAsked | RefusedByScheduler) -> list[Effect]:
        if self.order is not None:
            return self._defer(event)
        self.phase = MemoryPhase.ENDED
        if isinstance(event, ShutdownAsked):
            end = Exit(code=ExitCode.DONE, reason=event.reason)
            return [end] if event.keep_memory else [UnlinkMemory(), end]
        if isinstance(event, RefusedByScheduler):
            return [Exit(code=ExitCode.LOST_MEMBERS, reason=event.reason)]
        return [Exit(code=ExitCode.INTERRUPTED, reason="asked to stop; memory is kept")]

    def _on_restored(self, event: Restored) -> list[Effect]:
        order = self._end_job(MemoryPhase.DRAINED)
        assert isinstance(order, RestoreAsked), "only a restore ends with Restored"
        # A drain that came meanwhile makes the answer stale; the memory is good all the same.
        return self._follow() or [SendRestored(epoch=order.epoch, incarnation=order.incarnation)]

    def _on_saved(self, event: Saved) -> list[Effect]:
        order = self._end_job(MemoryPhase.READY)
        assert isinstance(order, SaveAsked), "only a save ends with Saved"
        return self._follow() or [
            SendSaved(epoch=order.epoch, version=order.version, files=event.files, error="")
        ]

    def _on_job_failed(self, event: JobFailed) -> list[Effect]:
        order = self.order
        self._end_job(MemoryPhase.READY if isinstance(order, SaveAsked) else MemoryPhase.DRAINED)
        if isinstance(order, SaveAsked):  # the run goes on without this saved state
            return self._follow() or [
                SendSaved(epoch=order.epoch, version=order.version, files=(), error=event.error)
            ]
        deferred = self._follow()
        if deferred:
            return deferred
        self.phase = MemoryPhase.ENDED
        return [
            SendFailed(epoch=self.epoch, error=event.error, code=event.exit_code),
            Exit(code=event.exit_code, reason=event.error),
        ]

    def _on_job_cancelled(self, event: JobCancelled) -> list[Effect]:
        self._end_job(MemoryPhase.DRAINED)
        return self._follow()

    def _defer(
        self, event: DrainAsked | ShutdownAsked | StopAsked | RefusedByScheduler
    ) -> list[Effect]:
        """Wait for the job's end. What ends the process outweighs a drain, a newer one an older."""
        if isinstance(event, DrainAsked) and self.deferred is not None:
            if isinstance(self.deferred, DrainAsked):
                self.deferred = event
            return []
        first = self.deferred is None
        self.deferred = event
        return [CancelJob()] if first else []

    def _end_job(self, phase: MemoryPhase) -> RestoreAsked | SaveAsked | None:
        order, self.order = self.order, None
        assert order is not None, "a job answered that was never started"
        self.phase = phase
        return order

    def _follow(self) -> list[Effect]:
        """Do what waited for the job's end."""
        event, self.deferred = self.deferred, None
        return [] if event is None else _HANDLERS[type(event)](self, event)


def _stale(event: Event, epoch: int) -> Say:
    return Say(text=f"ignored: {event} in epoch {epoch}")


def _out_of_order(event: Event, state: MemoryMachine) -> Say:
    return Say(text=f"ignored: {event} in epoch {state.epoch}, phase {state.phase}")


_HANDLERS: dict[type, Callable[[MemoryMachine, Any], list[Effect]]] = {
    DrainAsked: MemoryMachine._on_drain,
    RestoreAsked: MemoryMachine._on_restore,
    BeginAsked: MemoryMachine._on_begin,
    SaveAsked: MemoryMachine._on_save,
    ShutdownAsked: MemoryMachine._on_end,
    StopAsked: MemoryMachine._on_end,
    RefusedByScheduler: MemoryMachine._on_end,
    Restored: MemoryMachine._on_restored,
    Saved: MemoryMachine._on_saved,
    JobFailed: MemoryMachine._on_job_failed,
    JobCancelled: MemoryMachine._on_job_cancelled,
}
