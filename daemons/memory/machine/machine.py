"""Decides for a memoryd: a pure machine that turns events into effects.

::

    JOINING --Drain--> DRAINED --Restore--> RESTORING --Restored--> DRAINED --Begin--> READY
    READY --Save--> the save runs during DRAINED and READY, until it is Saved
    a job --another order, the end--> it is cancelled; what was ordered follows when it has answered
    any --Shutdown, Refused, SIGTERM--> ENDED

One job (restore or save) runs at a time. A Drain names the save that continues across the barrier,
cancels any other job, and is acknowledged only after that job has ended. So after ``Drained`` no
thread of this process writes model state, and only that save reads it; a Restore cancels the save.
Every Drain that still names a finished save is answered with the save's result again: the first
message may have been lost with its stream. Messages of an older epoch are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from penstock.daemons.kit.events import (
    BeginAsked,
    DrainAsked,
    Exit,
    LogLine,
    RefusedByScheduler,
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
    SendPinned,
    SendRestored,
    SendSaved,
    SourceDamaged,
    StartRestore,
    StartSave,
    UnlinkMemory,
    WrittenFile,
)
from penstock.host.errors import ExitCode


class MemoryPhase(StrEnum):
    """See the module's picture."""

    JOINING = "joining"
    DRAINED = "drained"
    RESTORING = "restoring"
    READY = "ready"
    ENDED = "ended"


_Deferred: TypeAlias = (
    DrainAsked | RestoreAsked | SaveAsked | ShutdownAsked | StopAsked | RefusedByScheduler
)
_ENDS = (ShutdownAsked, StopAsked, RefusedByScheduler)


@dataclass(slots=True, kw_only=True)
class MemoryMachine:
    """Turns events (:meth:`handle`) into effects, which the caller carries out in order.

    ``epoch``: the epoch of the last drain. ``order``: the current restore or save. ``deferred``:
    the event that interrupted the order and waits for its end. ``said``: the last save's result,
    until the scheduler surely has it.
    """

    epoch: int = 0
    phase: MemoryPhase = MemoryPhase.JOINING
    order: RestoreAsked | SaveAsked | None = None
    deferred: _Deferred | None = None
    said: SendSaved | None = None

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Returns what to do about ``event``; nothing that a memoryd decides depends on time."""
        if self.phase is MemoryPhase.ENDED:
            return [LogLine(text=f"ignored: {type(event).__name__} after the end")]
        return _HANDLERS[type(event)](self, event)

    def validate(self) -> None:
        """Checks that a restore runs exactly in its phase, and a save in no other phase.

        Raises:
            ValueError: naming phase and order.
        """
        restoring = self.phase is MemoryPhase.RESTORING
        ended = self.phase in (MemoryPhase.JOINING, MemoryPhase.ENDED)
        saves = isinstance(self.order, SaveAsked)
        if isinstance(self.order, RestoreAsked) != restoring or (ended and saves):
            raise ValueError(f"phase {self.phase} with order {self.order}")
        if self.deferred is not None and self.order is None:
            raise ValueError(f"{self.deferred} waits for a job, but none runs")

    def _on_drain(self, event: DrainAsked) -> list[Effect]:
        if event.epoch < self.epoch:
            return [_stale(event, self.epoch)]
        if self.order is not None and not self._goes_on(event):
            return self._defer(event)
        self.epoch = event.epoch
        self.phase = MemoryPhase.DRAINED
        drained: list[Effect] = [SendDrained(epoch=event.epoch)]
        if self.said is not None and self.said.number == event.saving:
            return [*drained, self.said]
        self.said = None
        return drained

    def _goes_on(self, event: DrainAsked) -> bool:
        """Returns whether the current job is the save that a Drain names."""
        order = self.order
        named = isinstance(order, SaveAsked) and order.number == event.saving
        return named and self.deferred is None

    def _on_restore(self, event: RestoreAsked) -> list[Effect]:
        if event.epoch != self.epoch or self.phase is not MemoryPhase.DRAINED:
            return [_out_of_order(event, self)]
        if self.order is not None:
            return self._defer(event)
        self.phase, self.order = MemoryPhase.RESTORING, event
        return [
            StartRestore(
                incarnation=event.incarnation,
                source=event.source,
                version=event.version,
                replica=event.replica,
            )
        ]

    def _on_begin(self, event: BeginAsked) -> list[Effect]:
        if event.epoch != self.epoch or self.phase not in (MemoryPhase.DRAINED, MemoryPhase.READY):
            return [_out_of_order(event, self)]
        self.phase = MemoryPhase.READY
        return [SendReady(epoch=event.epoch)]

    def _on_save(self, event: SaveAsked) -> list[Effect]:
        if event.epoch != self.epoch or self.phase is not MemoryPhase.READY:
            return [_out_of_order(event, self)]
        if self.order is not None:
            return self._defer(event)
        self.order, self.said = event, None
        return [
            StartSave(
                version=event.version, directory=event.directory, weights_only=event.weights_only
            ),
            SendPinned(epoch=event.epoch, number=event.number, version=event.version),
        ]

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
        order = self._end_restore()
        # A drain that came meanwhile makes the answer stale; the memory is good all the same.
        return self._follow() or [SendRestored(epoch=order.epoch, incarnation=order.incarnation)]

    def _on_damaged(self, event: SourceDamaged) -> list[Effect]:
        order = self._end_restore()
        return self._follow() or [
            SendRestored(
                epoch=order.epoch, incarnation=order.incarnation, damaged=event.error or "damaged"
            )
        ]

    def _on_saved(self, event: Saved) -> list[Effect]:
        return self._save_ended(event.files, "", event.seconds)

    def _save_ended(
        self, files: tuple[WrittenFile, ...], error: str, seconds: float = 0.0
    ) -> list[Effect]:
        order, self.order = self.order, None
        assert isinstance(order, SaveAsked), "this result is not of a save"
        self.said = SendSaved(
            epoch=order.epoch,
            number=order.number,
            version=order.version,
            files=files,
            error=error,
            seconds=seconds,
        )
        return self._follow() or [self.said]

    def _on_job_failed(self, event: JobFailed) -> list[Effect]:
        if isinstance(self.order, SaveAsked):  # the run goes on without this saved state
            return self._save_ended((), event.error)
        order = self._end_restore()
        deferred = self._follow()
        if deferred:
            return deferred
        if order.replica is not None:
            # Nothing is lost yet: the scheduler has older sources.
            failure = f"the replica of {order.replica.address} cannot be used: {event.error}"
            answer = SendRestored(epoch=order.epoch, incarnation=0)
            return [LogLine(text=failure, warning=True), answer]
        self.phase = MemoryPhase.ENDED
        return [
            SendFailed(epoch=self.epoch, error=event.error, code=event.exit_code),
            Exit(code=event.exit_code, reason=event.error),
        ]

    def _on_job_cancelled(self, event: JobCancelled) -> list[Effect]:
        assert self.order is not None, "a job answered that was never started"
        if isinstance(self.order, RestoreAsked):
            self.phase = MemoryPhase.DRAINED
        self.order = None
        return self._follow()

    def _defer(self, event: _Deferred) -> list[Effect]:
        """Waits for the job's end. An event that ends the process replaces every other one. Of two
        such events the scheduler's replaces a signal, because it says whether memory is kept.
        Otherwise the newer order replaces the older.
        """
        first = self.deferred is None
        if isinstance(event, ShutdownAsked) or not isinstance(self.deferred, _ENDS):
            self.deferred = event
        return [CancelJob()] if first else []

    def _end_restore(self) -> RestoreAsked:
        order, self.order = self.order, None
        assert isinstance(order, RestoreAsked), "this result is not of a restore"
        self.phase = MemoryPhase.DRAINED
        return order

    def _follow(self) -> list[Effect]:
        """Handles the event that waited for the job's end."""
        event, self.deferred = self.deferred, None
        return [] if event is None else _HANDLERS[type(event)](self, event)


def _stale(event: Event, epoch: int) -> LogLine:
    return LogLine(text=f"ignored: {event} in membership {epoch}")


def _out_of_order(event: Event, state: MemoryMachine) -> LogLine:
    return LogLine(text=f"ignored: {event} in membership {state.epoch}, phase {state.phase}")


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
    SourceDamaged: MemoryMachine._on_damaged,
    JobFailed: MemoryMachine._on_job_failed,
    JobCancelled: MemoryMachine._on_job_cancelled,
}
