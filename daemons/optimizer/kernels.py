"""Turns a sweep into one native call on a node's memory.

Arrays are views of shared memory, made once. Contributions of other nodes are in private buffers
(:class:`RemoteGradients`), one for each copy. So a later settle finds the gradients that an earlier
sweep has checked.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from penstock import _native
from penstock.config.training import OptimizerConfig
from penstock.daemons.optimizer.machine.events import OwnedBlock, UpdatePolicy
from penstock.daemons.optimizer.machine.sweeps import (
    Advance,
    CastWeights,
    FinishHold,
    FinishInvert,
    FinishSettle,
    GradientStatus,
    Hold,
    Invert,
    Preview,
    Settle,
    Sweep,
    sweep_tag,
)
from penstock.protocol.plan.step import BlockArrays, SweepStatus
from penstock.protocol.run.hardware.placement import Placement, array_places
from penstock.shm.memory import NUMPY_TYPES, Array, NodeMemory
from penstock.shm.pages import prefer_nodes_if_granted


def owned_blocks(
    memory: NodeMemory, policy: Callable[[int], UpdatePolicy] = lambda block: UpdatePolicy.ADVANCE
) -> tuple[OwnedBlock, ...]:
    """Returns the node's blocks, with the contributions that it does not compute itself."""
    blocks = []
    for index in memory.owned_blocks():
        trains = memory.spec.table.blocks[index].trainable_elements > 0
        contributions = memory.spec.layout.contributions[index] if trains else 0
        remote = frozenset(
            k for k in range(contributions) if not memory.has((index, "grads", 0, k))
        )
        blocks.append(
            OwnedBlock(
                index=index, contributions=contributions, remote=remote, policy=policy(index)
            )
        )
    return tuple(blocks)


class RemoteGradients:
    """Private buffers for contributions of other nodes, one for each copy.

    Each is flat, of the block's trainable elements, in the type of gradients (bf16 as uint16).
    Their pages are touched before the first step, on the NUMA nodes that ``placement`` wants (None:
    anywhere).
    """

    def __init__(
        self, memory: NodeMemory, blocks: Iterable[OwnedBlock], placement: Placement | None = None
    ) -> None:
        table = memory.spec.table
        dtype = np.dtype(NUMPY_TYPES[table.grad_dtype])
        self._arrays: dict[tuple[int, int, int], Array] = {}
        for block in blocks:
            for contribution in block.remote:
                count = table.blocks[block.index].trainable_elements
                for copy in range(memory.spec.layout.gradient_copies[block.index]):
                    # Mapped, not allocated: page-aligned, as the native sweeps want it.
                    mapping = mmap.mmap(-1, count * dtype.itemsize)
                    if placement is not None and placement.several:
                        places = array_places(placement, dtype.itemsize, count)
                        prefer_nodes_if_granted(mapping, places)
                    array = np.frombuffer(mapping, dtype=dtype)
                    array.fill(0)
                    self._arrays[(block.index, contribution, copy)] = array

    def array(self, block: int, contribution: int, copy: int) -> Array:
        """Returns the buffer of one contribution: (elements,), in the type of gradients."""
        return self._arrays[(block, contribution, copy)]


class Kernels:
    """Runs sweeps, one at a time, on the threads of ``pool``."""

    def __init__(
        self,
        pool: _native.Pool,
        memory: NodeMemory,
        config: OptimizerConfig,
        blocks: Iterable[OwnedBlock],
        remote: RemoteGradients,
    ) -> None:
        self._pool = pool
        # For blocks with two copies of their state; its threads begin with the first of them.
        self._copying = ThreadPoolExecutor(pool.num_threads, thread_name_prefix="optimizer-copy")
        self._config = config
        self._undo = memory.control.undo_area
        self._arrays = {
            b.index: BlockArrays.of(
                memory, b.index, config, partial(_grads, memory, remote, b.remote)
            )
            for b in blocks
            if b.contributions
        }
        self._calls: dict[type[Any], Callable[[Any], SweepStatus | None]] = {
            Preview: self._preview,
            Settle: self._settle,
            Advance: self._advance,
            FinishSettle: self._finish,
            Hold: self._hold,
            FinishHold: self._finish_hold,
            Invert: self._invert,
            FinishInvert: self._finish_invert,
            GradientStatus: self._gradient_status,
            CastWeights: self._cast,
        }

    def moved_by(self, work: Sweep) -> tuple[float, float]:
        """Returns the parameters of a sweep, padding included, and the bytes of DRAM that it reads
        and writes. A repair counts as its whole sweep.
        """
        arrays = self._arrays[work.block]
        grads = sum(array.itemsize for array in arrays.grads[0])
        weights = arrays.weights[0].itemsize
        state = sum(array.itemsize for array in arrays.states[0].arrays)
        read = 4 + state  # of a split master both halves
        written = arrays.states[0].master.itemsize + state
        if len(arrays.states) > 1:  # sweeps over the state copy it first
            written += read + written
        of_each = {
            Preview: read + grads + weights,
            Settle: read + grads + written,
            FinishSettle: read + grads + written,
            Advance: read + 2 * grads + written + weights,
            Hold: read + grads + written + weights,
            FinishHold: read + grads + written + weights,
            Invert: read + grads + written,
            FinishInvert: read + grads + written,
            GradientStatus: grads,
            CastWeights: 4 + weights,
        }
        parameters = len(arrays.states[0].master)
        return parameters, parameters * of_each[type(work)]

    def run(self, work: Sweep) -> SweepStatus | None:
        """Runs one sweep to its end; returns its status if it checked new gradients.

        Raises:
            ValueError, RuntimeError: from the native module: arrays, hyper-parameters or the undo
                area are not what the sweep needs. Nothing was written.
        """
        return self._calls[type(work)](work)

    def close(self) -> None:
        """Releases all views of shared memory, which cannot be unmapped while a view exists."""
        self._copying.shutdown()
        self._arrays.clear()
        self._undo.release()

    def _preview(self, work: Preview) -> SweepStatus:
        return self._arrays[work.block].preview(self._pool, work.update, self._config)

    def _settle(
        self, work: Settle | FinishSettle, spans: list[tuple[int, int]] | None = None
    ) -> None:
        version = work.update.version
        self._write_state(_native.settle, work, version - 1, version, spans)

    def _finish(self, work: FinishSettle) -> None:
        self._settle(work, self._repair(work))

    def _finish_hold(self, work: FinishHold) -> None:
        self._hold(work, self._repair(work))

    def _repair(self, work: FinishSettle | FinishHold) -> list[tuple[int, int]]:
        arrays, version = self._arrays[work.block], work.update.version
        state = arrays.state(version if len(arrays.states) > 1 else version - 1)
        return _native.repair(self._undo, **state)

    def _hold(self, work: Hold | FinishHold, spans: list[tuple[int, int]] | None = None) -> None:
        arrays, version = self._arrays[work.block], work.update.version
        _native.hold(
            self._pool,
            **self._led_on(arrays, version - 1, version, begun=spans is not None),
            grads=arrays.gradients(version),
            hyper=work.update.hyper(self._config),
            weights=arrays.weights[version % 2],
            weights_dtype=arrays.weights_dtype,
            ranges=arrays.ranges,
            undo=self._undo,
            spans=spans,
            tag=sweep_tag(work.block, version),
        )

    def _finish_invert(self, work: FinishInvert) -> None:
        state = self._arrays[work.block].state(work.update.version)
        self._invert(work, _native.repair(self._undo, **state))

    def _invert(
        self, work: Invert | FinishInvert, spans: list[tuple[int, int]] | None = None
    ) -> None:
        version = work.update.version
        self._write_state(_native.invert, work, version, version - 1, spans)

    def _write_state(
        self,
        run: Callable[..., None],
        work: Settle | FinishSettle | Invert | FinishInvert,
        before: int,
        after: int,
        spans: list[tuple[int, int]] | None,
    ) -> None:
        """Brings the state from version ``before`` to ``after`` with the update's gradients."""
        arrays = self._arrays[work.block]
        run(
            self._pool,
            **self._led_on(arrays, before, after, begun=spans is not None),
            grads=arrays.gradients(work.update.version),
            hyper=work.update.hyper(self._config),
            ranges=arrays.ranges,
            undo=self._undo,
            spans=spans,
            tag=sweep_tag(work.block, after),
        )

    def _advance(self, work: Advance) -> SweepStatus:
        arrays, pending, version = self._arrays[work.block], work.pending, work.update.version
        status = _native.advance(
            self._pool,
            **self._led_on(arrays, pending.version - 1, pending.version),
            pending_grads=arrays.gradients(pending.version),
            pending_hyper=pending.hyper(self._config),
            grads=arrays.gradients(version),
            hyper=work.update.hyper(self._config),
            weights=arrays.weights[version % 2],
            weights_dtype=arrays.weights_dtype,
            ranges=arrays.ranges,
            undo=self._undo,
            tag=sweep_tag(work.block, pending.version),
        )
        return _status(status)

    def _led_on(
        self, arrays: BlockArrays, before: int, after: int, *, begun: bool = False
    ) -> dict[str, Any]:
        """Returns the arguments of a sweep that advances the state from version ``before`` to
        ``after``.

        The sweep works in place. A block with two copies of its state keeps the later version in
        the other copy, so the earlier state is copied there first. A sweep that had ``begun``
        before it was cut short skips this: the undo area is armed only after the copy.
        """
        if len(arrays.states) == 1:
            return arrays.state(before)
        if not begun:
            arrays.copy_of(after).fill(arrays.copy_of(before), self._copying)
        return arrays.state(after)

    def _gradient_status(self, work: GradientStatus) -> SweepStatus:
        grads = self._arrays[work.block].gradients(work.version)
        return _status(_native.gradient_status(self._pool, grads=grads))

    def _cast(self, work: CastWeights) -> None:
        arrays = self._arrays[work.block]
        if arrays.split:
            return  # they are the upper halves of the state itself: only their word was missing
        _native.cast_weights(
            self._pool,
            master=arrays.copy_of(work.version).master,
            weights=arrays.weights[work.version % 2],
            weights_dtype=arrays.weights_dtype,
        )


def _grads(
    memory: NodeMemory,
    remote: RemoteGradients,
    elsewhere: frozenset[int],
    block: int,
    copy: int,
    contribution: int,
) -> Array:
    if contribution in elsewhere:
        return remote.array(block, contribution, copy)
    return memory.grads(block, copy, contribution)


def _status(status: _native.Status) -> SweepStatus:
    return SweepStatus(finite=status.finite, sum_squares=status.sum_squares)
