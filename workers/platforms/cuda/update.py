"""UPDATE on a GPU: state comes in piece by piece; only weights go back, or weights and state.

The three streams host-to-device, arithmetic and device-to-host run concurrently to the computation.
Two pieces are on the device at a time: one arrives while the other is computed and leaves. The host
waits only for the last byte. Then one number comes back, the sum of squares, which also shows
whether all gradients are finite.

Gradients are read from host memory, where the block's workers have published them. The partials of
a block arrive one after the other in the same memory.

A flushed block (Deep Optimizer States, algorithm 1) sends its next state back after its weights.
The state goes into the copy in host memory that does not count before the commit.

Residents (:mod:`penstock.workers.state.residents`) have their whole state on the device, and the
sum of their gradients. The commit is applied to that state piece by piece, right before the
preview. The preview works on a copy of the piece, as for all blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.config.training import OptimizerConfig
from penstock.models.gpu import Event, Gpu
from penstock.models.step import Piece, StepScalars, apply, sum_squares
from penstock.protocol.plan.groups import StepRange
from penstock.protocol.plan.resources import PIECE_ELEMENTS, PIECES
from penstock.protocol.plan.step import BlockArrays, OptimizerStep, StateArrays, SweepStatus
from penstock.shm.layout import WEIGHT_SLOTS
from penstock.shm.memory import NodeMemory
from penstock.workers.device import HostArray, as_tensor, storage_dtype
from penstock.workers.state.residents import Lag, Residents
from penstock.workers.state.updates import PreviewedBlock, UpdateScope
from penstock.workers.waiting import Abort

_STATE = ("master", "exp_avg", "exp_avg_sq")
"""Adam's and AdamW's; no other optimizer's updates are executed on GPUs."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Room for one piece, with the events to wait for before its reuse.

    ``arrived``: the copies issued last; ``consumed``: the arithmetic on them; ``left``: the copies
    of the weights, and of the state if it goes back.
    """

    state: dict[str, torch.Tensor]
    incoming: torch.Tensor
    gradients: torch.Tensor
    weights: torch.Tensor
    arrived: Event
    consumed: Event
    left: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resident:
    """A block's state, and the sum of the gradients that may be committed next, all fp32."""

    state: dict[str, torch.Tensor]
    gradients: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One block: ``resident`` and the missing part of its copy, if it is a resident; ``target``:
    the place of its next state, if it is flushed.
    """

    arrays: BlockArrays
    scalars: StepScalars
    version: int
    target: StateArrays | None
    resident: _Resident | None
    lag: Lag
    committed: StepScalars | None


class CudaPreviewer:
    """See :class:`penstock.workers.state.updates.Previewer`."""

    def __init__(
        self,
        gpu: Gpu,
        memory: NodeMemory,
        config: OptimizerConfig,
        blocks: Sequence[int],
        residents: Collection[int] = (),
        flushed: Collection[int] = (),
    ) -> None:
        """Prepares the blocks. ``blocks``: those that the device updates. The state of
        ``residents`` stays on the device, that of ``flushed`` goes back.
        """
        self._gpu = gpu
        self._memory = memory
        self._config = config
        table = memory.spec.table
        self._flushed = flushed
        self._weight_dtype, self._grad_dtype = table.weight_dtype, table.grad_dtype
        largest = max(table.blocks[block].trainable_elements for block in blocks)
        self._piece = min(PIECE_ELEMENTS, largest)
        with self._gpu.current():
            self._in = gpu.stream()
            self._arithmetic = gpu.stream()
            self._out = gpu.stream()
            self._slots = [self._slot() for _ in range(PIECES)]
            self._scratch = self._empty(torch.float32)
            self._squares = self._empty(torch.float64)
            self._total = torch.zeros((), dtype=torch.float64, device=self._gpu.device)
            sizes = {block: table.blocks[block].trainable_elements for block in residents}
            self._resident = {block: self._room(size) for block, size in sizes.items()}
            # The memory's previous user may still run on another stream.
            self._gpu.synchronize()
        self._arrays: dict[int, BlockArrays] = {}
        self._residents = Residents(memory.control)

    def issue(self, block: int) -> None:
        """Does nothing: no preparation is needed."""

    def fetch(self, block: int, scope: UpdateScope) -> None:
        """Does nothing: state comes with the gradients, as only two pieces fit."""

    def preview(self, block: int, scope: UpdateScope) -> PreviewedBlock:
        """Runs the preview piece by piece; an abort waits for the current copies."""
        start_s = time.perf_counter()
        work = self._work(block, scope.step)
        self._residents.forget(block)
        with self._gpu.current():  # of this thread
            try:
                self._preview(work, scope.abort)
                self._out.synchronize()
                with self._gpu.on(self._arithmetic):
                    total = float(self._total.item())
            except BaseException:
                self._gpu.synchronize()  # nothing is written after the attempt's end
                raise
        if work.resident is not None:
            self._residents.keep(block, scope.step.version - 1, scope.attempt)
        status = SweepStatus(finite=math.isfinite(total), sum_squares=total)
        return PreviewedBlock(status=status, start_s=start_s, end_s=time.perf_counter())

    def close(self) -> None:
        """Frees the device's memory: no update is in progress."""
        self._arrays.clear()
        self._slots.clear()
        self._resident.clear()

    def _work(self, block: int, step: OptimizerStep) -> _Work:
        arrays = self._arrays.get(block)
        if arrays is None:
            arrays = BlockArrays.of(self._memory, block, self._config)
            self._arrays[block] = arrays
        resident = self._resident.get(block)
        lag = Lag(whole=True)
        if resident is not None:
            lag = self._residents.lag(block, step.version - 1)
        return _Work(
            arrays=arrays,
            scalars=StepScalars.of(step, self._config),
            version=step.version,
            target=arrays.copy_of(step.version) if block in self._flushed else None,
            resident=resident,
            lag=lag,
            committed=None if lag.step is None else StepScalars.of(lag.step, self._config),
        )

    def _preview(self, work: _Work, abort: Abort) -> None:
        arrays, source = work.arrays, work.arrays.copy_of(work.version - 1)
        grads = arrays.gradients(work.version)
        weights = arrays.weights[work.version % WEIGHT_SLOTS]
        with self._gpu.on(self._arithmetic):
            self._total.zero_()
        for number, (start, end) in enumerate(self._pieces(len(weights))):
            abort.check()
            slot = self._slots[number % PIECES]
            # Earlier uses of the slot must be over. The host waits, not a stream: queues stay
            # short, so that an abort is soon noticed.
            slot.left.synchronize()
            if work.lag.whole:
                self._bring(slot, source, start, end)
            self._add_up(slot, grads, start, end)
            ranges = _within(arrays.ranges, start, end)
            if work.resident is not None:
                self._exchange(slot, work.resident, work, ranges, slice(start, end))
            self._compute(slot, work.scalars, ranges, end - start)
            self._take_back(slot, weights[start:end], work.target, slice(start, end))

    def _pieces(self, num_elements: int) -> Iterator[tuple[int, int]]:
        for start in range(0, num_elements, self._piece):
            yield start, min(start + self._piece, num_elements)

    def _bring(self, slot: _Slot, source: StateArrays, start: int, end: int) -> None:
        # No wait: in _preview() the host has waited for all earlier uses of the slot.
        with self._gpu.on(self._in):
            for on_device, array in zip(slot.state.values(), source.all, strict=True):
                on_device[: end - start].copy_(
                    torch.from_numpy(array[start:end]), non_blocking=True
                )

    def _add_up(self, slot: _Slot, grads: Sequence[HostArray], start: int, end: int) -> None:
        """Adds all partials, in their order, as fp32."""
        incoming, total = slot.incoming[: end - start], slot.gradients[: end - start]
        for index, host in enumerate(grads):
            with self._gpu.on(self._in):
                # ``incoming`` holds one partial: the arithmetic must have read the one before.
                self._in.wait_event(slot.consumed)
                incoming.copy_(as_tensor(host[start:end], self._grad_dtype), non_blocking=True)
                slot.arrived.record(self._in)
            with self._gpu.on(self._arithmetic):
                # Covers the state, too: its copies were issued before on the same stream.
                self._arithmetic.wait_event(slot.arrived)
                if index:
                    scratch = self._scratch[: end - start].copy_(incoming)
                    total.add_(scratch)
                else:
                    total.copy_(incoming)
                slot.consumed.record(self._arithmetic)

    def _exchange(
        self,
        slot: _Slot,
        resident: _Resident,
        work: _Work,
        ranges: Sequence[StepRange],
        part: slice,
    ) -> None:
        """Exchanges a piece with the resident: its state of the committed version is in the slot
        and on the device afterwards. So are its new gradients.
        """
        count = part.stop - part.start
        here = {name: array[part] for name, array in resident.state.items()}
        kept = resident.gradients[part]
        with self._gpu.on(self._arithmetic):
            if work.committed is not None:
                piece = Piece(**here, gradients=kept, scratch=self._scratch[:count], ranges=ranges)
                apply(piece, work.committed)
            for name, array in here.items():
                if work.lag.whole:
                    array.copy_(slot.state[name][:count])
                else:
                    slot.state[name][:count].copy_(array)
            kept.copy_(slot.gradients[:count])

    def _compute(
        self,
        slot: _Slot,
        scalars: StepScalars,
        ranges: Sequence[StepRange],
        count: int,
    ) -> None:
        piece = Piece(
            master=slot.state["master"][:count],
            exp_avg=slot.state["exp_avg"][:count],
            exp_avg_sq=slot.state["exp_avg_sq"][:count],
            gradients=slot.gradients[:count],
            scratch=self._scratch[:count],
            ranges=ranges,
        )
        with self._gpu.on(self._arithmetic):
            self._total.add_(sum_squares(piece.gradients, self._squares[:count]))
            slot.weights[:count].copy_(apply(piece, scalars))
            slot.consumed.record(self._arithmetic)

    def _take_back(
        self, slot: _Slot, weights: HostArray, state: StateArrays | None, part: slice
    ) -> None:
        count = len(weights)
        with self._gpu.on(self._out):
            # The weights and the state must be computed before they leave.
            self._out.wait_event(slot.consumed)
            host = as_tensor(weights, self._weight_dtype)
            host.copy_(slot.weights[:count], non_blocking=True)
            if state is not None:
                for array, here in zip(state.all, slot.state.values(), strict=True):
                    torch.from_numpy(array[part]).copy_(here[:count], non_blocking=True)
            slot.left.record(self._out)

    def _slot(self) -> _Slot:
        return _Slot(
            state={name: self._empty(torch.float32) for name in _STATE},
            incoming=self._empty(storage_dtype(self._grad_dtype)),
            gradients=self._empty(torch.float32),
            weights=self._empty(storage_dtype(self._weight_dtype)),
            arrived=self._gpu.event(),
            consumed=self._gpu.event(),
            left=self._gpu.event(),
        )

    def _room(self, size: int) -> _Resident:
        state = {name: torch.empty(size, device=self._gpu.device) for name in _STATE}
        return _Resident(state=state, gradients=torch.empty(size, device=self._gpu.device))

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._piece, dtype=dtype, device=self._gpu.device)


def _within(ranges: Sequence[StepRange], start: int, end: int) -> list[StepRange]:
    """Returns the ranges of elements [start, end), counted from ``start``."""
    return [
        StepRange(max(first, start) - start, min(last, end) - start, decay, rate)
        for first, last, decay, rate in ranges
        if first < end and last > start
    ]
