"""Carries out the state machine's effects: control words, sweeps, pulls, messages.

The caller's thread writes words, in the order of the effects. Sweeps run on their own thread, which
drives the threads of the pool.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock._native import undo_state
from penstock.daemons.kit.events import EffectFailed, Exit, SendDrained, SendFailed, SendReady
from penstock.daemons.kit.messages import answer
from penstock.daemons.optimizer.machine.events import (
    BeginSweep,
    BlockWords,
    CancelPulls,
    Effect,
    EndSweep,
    Event,
    FlipCommitted,
    MemoryFacts,
    OwnedBlock,
    Pull,
    RunSweep,
    SendAmended,
    SendBlockStatus,
    SendHeard,
    SendSettled,
    SetEpoch,
    SetSlot,
    SetState,
    SweepDone,
    UndoWords,
    WriteRecord,
)
from penstock.daemons.optimizer.machine.sweeps import Sweep
from penstock.host import world
from penstock.host.errors import StateError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.step import SweepStatus
from penstock.shm.control import ControlView, SweepIntent


def read_facts(control: ControlView, blocks: Sequence[OwnedBlock]) -> MemoryFacts:
    """Returns what the control segment says. No sweep may run meanwhile: it would change words.

    Raises:
        StateError: the undo area is none.
    """
    try:
        undo = undo_state(control.undo_area)
    except ValueError as error:
        raise StateError(f"the control segment of this node is damaged: {error}") from error
    committed = control.committed
    return MemoryFacts(
        incarnation=control.incarnation,
        committed=committed,
        record=control.record(committed),
        next_record=control.record(committed + 1),
        interrupted=control.interrupted_sweep,
        undo=UndoWords(armed=undo.armed, tag=undo.tag, completed=undo.completed),
        blocks={
            b.index: BlockWords(
                state_version=control.state_version(b.index),
                slots=(control.slot_version(b.index, 0), control.slot_version(b.index, 1)),
            )
            for b in blocks
        },
        pins=read_pins(control, (block.index for block in blocks)),
    )


def read_pins(control: ControlView, blocks: Iterable[int]) -> dict[int, int]:
    """Returns block -> pinned version, of those that have one."""
    return {block: pin for block in blocks if (pin := control.pin(block)) is not None}


class ControlWords:
    """Writes the words that effects name."""

    def __init__(self, control: ControlView) -> None:
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            WriteRecord: lambda e: control.write_record(e.record),
            FlipCommitted: lambda e: control.set_committed(e.version),
            SetEpoch: lambda e: control.set_epoch(e.epoch),
            SetSlot: lambda e: control.set_slot_version(e.block, e.slot, e.version),
            SetState: lambda e: control.set_state_version(e.block, e.version),
            BeginSweep: lambda e: control.begin_sweep(
                SweepIntent(block=e.block, state_version=e.state_version)
            ),
            EndSweep: lambda e: control.end_sweep(),
        }

    def write(self, effect: Effect) -> bool:
        """Carries out an effect on a control word; returns False if it is of another kind."""
        handler = self._handlers.get(type(effect))
        if handler is not None:
            handler(effect)
        return handler is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSweep:
    """A sweep with its outcome. Start and end are readings of ``time.perf_counter``."""

    work: Sweep
    event: SweepDone | EffectFailed
    start_s: float
    end_s: float


class SweepRunner(Protocol):
    """:class:`penstock.daemons.optimizer.kernels.Kernels`, or what stands for it."""

    def run(self, work: Sweep) -> SweepStatus | None:
        """Runs one sweep to its end; returns its status if it checked new gradients."""

    def moved_by(self, work: Sweep) -> tuple[float, float]:
        """Returns the parameters that a sweep goes through, and the bytes of DRAM that it reads and
        writes.
        """


class SweepThread:
    """Runs sweeps one after the other and reports each."""

    def __init__(self, kernels: SweepRunner, report: Callable[[FinishedSweep], None]) -> None:
        self._kernels = kernels
        self._report = report
        self.running: Sweep | None = None
        """The running sweep. Only the sweep's thread writes it; heartbeats only read it."""
        self._orders: queue.SimpleQueue[Sweep | None] = world.queue()
        self._thread = world.thread(target=self._run, name="sweeps")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def order(self, work: Sweep) -> None:
        """Starts a sweep as soon as the one before has ended."""
        self._orders.put(work)

    def close(self) -> None:
        """Finishes the running sweep and ends the thread."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._orders.get()) is not None:
            self.running = work
            outcome = self._outcome(work)
            self.running = None
            self._report(outcome)

    def _outcome(self, work: Sweep) -> FinishedSweep:
        start_s = world.perf_counter()
        event: SweepDone | EffectFailed
        try:
            status = self._kernels.run(work)
        except Exception as error:
            # Reported, not raised: the state machine tells the scheduler why the run ends.
            event, end_s = EffectFailed(error=f"{work}: {error!r}"), world.perf_counter()
        else:
            end_s = world.perf_counter()
            event = SweepDone(status=status, seconds=end_s - start_s)
        return FinishedSweep(work=work, event=event, start_s=start_s, end_s=end_s)


class PullOrders(Protocol):
    """Methods of :class:`penstock.daemons.optimizer.pulls.Puller` that :class:`OptimizerEffects`
    calls.
    """

    def order(self, pull: Pull) -> None:
        """Queues a pull."""

    def cancel(self) -> None:
        """Cancels all pulls ordered so far."""


class OptimizerEffects:
    """Carries out effects; ``exit`` is set once the machine wants to end the process."""

    def __init__(
        self,
        *,
        control: ControlView,
        sweeps: SweepThread,
        pulls: PullOrders | None,
        send: Callable[[pb.MemberMessage], None],
    ) -> None:
        self.exit: Exit | None = None
        self._control = control
        self._words = ControlWords(control)
        self._send = send
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            RunSweep: lambda e: sweeps.order(e.work),
            SendDrained: self._send_drained,
            SendReady: self._answer,
            SendBlockStatus: self._send_block_status,
            SendHeard: self._send_heard,
            SendAmended: self._send_amended,
            SendSettled: self._send_settled,
            SendFailed: self._answer,
            Exit: self._exit,
        }
        if pulls is not None:
            self._handlers |= {Pull: pulls.order, CancelPulls: lambda e: pulls.cancel()}

    def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Carries out effects in order. Sweeps and pulls answer later: no event follows at once."""
        for effect in effects:
            if not self._words.write(effect):
                self._handlers[type(effect)](effect)
        return ()

    def _send_drained(self, effect: SendDrained) -> None:
        memory = pb.MemoryState(
            incarnation=self._control.incarnation, committed=self._control.committed
        )
        self._send(answer(effect, memory))

    def _answer(self, effect: SendReady | SendFailed) -> None:
        self._send(answer(effect))

    def _send_block_status(self, effect: SendBlockStatus) -> None:
        status = pb.BlockStatus(
            epoch=effect.epoch,
            attempt=effect.attempt,
            block=effect.block,
            finite=effect.status.finite,
            sum_squares=effect.status.sum_squares,
            seconds=effect.seconds,
        )
        self._send(pb.MemberMessage(block_status=status))

    def _send_heard(self, effect: SendHeard) -> None:
        heard = pb.AttemptHeard(epoch=effect.epoch, attempt=effect.attempt)
        self._send(pb.MemberMessage(attempt_heard=heard))

    def _send_amended(self, effect: SendAmended) -> None:
        amended = pb.Amended(epoch=effect.epoch, attempt=effect.attempt)
        self._send(pb.MemberMessage(amended=amended))

    def _send_settled(self, effect: SendSettled) -> None:
        settled = pb.Settled(epoch=effect.epoch, version=effect.version)
        self._send(pb.MemberMessage(settled=settled))

    def _exit(self, effect: Exit) -> None:
        self.exit = effect
