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

from penstock.daemons.memory.machine.events import (
    BeginOrdered,
    CancelJob,
    DrainOrdered,
    Effect,
    Event,
    Exit,
    Ignore,
    JobCancelled,
    JobFailed,
    RefusedByScheduler,
    Restored,
    RestoreOrdered,
    Saved,
    SaveOrdered,
    SendDrained,
    SendFailed,
    SendReady,
    SendRestored,
    SendSaved,
    ShutdownOrdered,
    StartRestore,
    StartSave,
    StopAsked,
    UnlinkMemory,
)
from penstock.protocol.errors import ExitCode


class Phase(StrEnum):
    """See the module's picture."""

    JOINING = "joining"
    DRAINED = "drained"
    RESTORING = "restoring"
    READY = "ready"
    SAVING = "saving"
    ENDED = "ended"


_WORKING = (Phase.RESTORING, Phase.SAVING)


@dataclass(slots=True, kw_only=True)
class MemoryState:
    """Feed :meth:`handle` with events and carry out what it returns, in order.

    ``epoch``: of the last drain. ``order``: the restore or save under way. ``deferred``: what
    interrupted it and waits for its end.
    """

    epoch: int = 0
    phase: Phase = Phase.JOINING
    order: RestoreOrdered | SaveOrdered | None = None
    deferred: DrainOrdered | ShutdownOrdered | StopAsked | RefusedByScheduler | None = None

    def handle(self, event: Event) -> list[Effect]:
        """What to do about ``event``."""
        if self.phase is Phase.ENDED:
            return [Ignore(why=f"{type(event).__name__} after the end")]
        effects = _HANDLERS[type(event)](self, event)
        self.validate()
        return effects

    def validate(self) -> None:
        """Check that an order is kept exactly while its job runs.

        Raises:
            ValueError: it is not.
        """
        if (self.order is not None) != (self.phase in _WORKING):
            raise ValueError(f"phase {self.phase} with order {self.order}")
        if self.deferred is not None and self.order is None:
            raise ValueError(f"{self.deferred} waits for a job, but none runs")

    def _on_drain(self, event: DrainOrdered) -> list[Effect]:
        if event.epoch < self.epoch:
            return [_stale(event, self.epoch)]
        if self.order is not None:
            return self._defer(event)
        self.epoch = event.epoch
        self.phase = Phase.DRAINED
        return [SendDrained(epoch=event.epoch)]

    def _on_restore(self, event: RestoreOrdered) -> list[Effect]:
        if event.epoch != self.epoch or self.phase is not Phase.DRAINED:
            return [_out_of_order(event, self)]
        self.phase, self.order = Phase.RESTORING, event
        return [
            StartRestore(incarnation=event.incarnation, source=event.source, version=event.version)
        ]

    def _on_begin(self, event: BeginOrdered) -> list[Effect]:
        if event.epoch != self.epoch or self.phase not in (Phase.DRAINED, Phase.READY):
            return [_out_of_order(event, self)]
        self.phase = Phase.READY
        return [SendReady(epoch=event.epoch)]

    def _on_save(self, event: SaveOrdered) -> list[Effect]:
        if event.epoch != self.epoch or self.phase is not Phase.READY:
            return [_out_of_order(event, self)]
        self.phase, self.order = Phase.SAVING, event
        return [StartSave(version=event.version, directory=event.directory)]

    def _on_end(self, event: ShutdownOrdered | StopAsked | RefusedByScheduler) -> list[Effect]:
        if self.order is not None:
            return self._defer(event)
        self.phase = Phase.ENDED
        if isinstance(event, ShutdownOrdered):
            end = Exit(exit_code=ExitCode.DONE, reason=event.reason)
            return [end] if event.keep_memory else [UnlinkMemory(), end]
        if isinstance(event, RefusedByScheduler):
            return [Exit(exit_code=ExitCode.LOST_MEMBERS, reason=event.reason)]
        return [Exit(exit_code=ExitCode.INTERRUPTED, reason="asked to stop; memory is kept")]

    def _on_restored(self, event: Restored) -> list[Effect]:
        order = self._end_job(Phase.DRAINED)
        assert isinstance(order, RestoreOrdered), "only a restore ends with Restored"
        # A drain that came meanwhile makes the answer stale; the memory is good all the same.
        return self._follow() or [SendRestored(epoch=order.epoch, incarnation=order.incarnation)]

    def _on_saved(self, event: Saved) -> list[Effect]:
        order = self._end_job(Phase.READY)
        assert isinstance(order, SaveOrdered), "only a save ends with Saved"
        return self._follow() or [
            SendSaved(epoch=order.epoch, version=order.version, files=event.files, error="")
        ]

    def _on_job_failed(self, event: JobFailed) -> list[Effect]:
        order = self.order
        self._end_job(Phase.READY if isinstance(order, SaveOrdered) else Phase.DRAINED)
        if isinstance(order, SaveOrdered):  # the run goes on without this saved state
            return self._follow() or [
                SendSaved(epoch=order.epoch, version=order.version, files=(), error=event.error)
            ]
        deferred = self._follow()
        if deferred:
            return deferred
        self.phase = Phase.ENDED
        return [
            SendFailed(epoch=self.epoch, error=event.error, exit_code=event.exit_code),
            Exit(exit_code=event.exit_code, reason=event.error),
        ]

    def _on_job_cancelled(self, event: JobCancelled) -> list[Effect]:
        self._end_job(Phase.DRAINED)
        return self._follow()

    def _defer(
        self, event: DrainOrdered | ShutdownOrdered | StopAsked | RefusedByScheduler
    ) -> list[Effect]:
        """Wait for the job's end. What ends the process outweighs a drain, a newer one an older."""
        if isinstance(event, DrainOrdered) and self.deferred is not None:
            if isinstance(self.deferred, DrainOrdered):
                self.deferred = event
            return []
        first = self.deferred is None
        self.deferred = event
        return [CancelJob()] if first else []

    def _end_job(self, phase: Phase) -> RestoreOrdered | SaveOrdered | None:
        order, self.order = self.order, None
        assert order is not None, "a job answered that was never started"
        self.phase = phase
        return order

    def _follow(self) -> list[Effect]:
        """Do what waited for the job's end."""
        event, self.deferred = self.deferred, None
        return [] if event is None else _HANDLERS[type(event)](self, event)


def _stale(event: Event, epoch: int) -> Ignore:
    return Ignore(why=f"{event} in epoch {epoch}")


def _out_of_order(event: Event, state: MemoryState) -> Ignore:
    return Ignore(why=f"{event} in epoch {state.epoch}, phase {state.phase}")


_HANDLERS: dict[type, Callable[[MemoryState, Any], list[Effect]]] = {
    DrainOrdered: MemoryState._on_drain,
    RestoreOrdered: MemoryState._on_restore,
    BeginOrdered: MemoryState._on_begin,
    SaveOrdered: MemoryState._on_save,
    ShutdownOrdered: MemoryState._on_end,
    StopAsked: MemoryState._on_end,
    RefusedByScheduler: MemoryState._on_end,
    Restored: MemoryState._on_restored,
    Saved: MemoryState._on_saved,
    JobFailed: MemoryState._on_job_failed,
    JobCancelled: MemoryState._on_job_cancelled,
}
