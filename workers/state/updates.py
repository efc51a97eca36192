"""UPDATE on a worker: previews of blocks on threads next to the interpreter.

An instruction only names the block. Threads then wait until the block may be previewed, in the
order of the instructions, preview it and report it. So state comes in, and weights leave, while the
device computes. The attempt ends after all previews.

A block waits for three conditions, all of them words of the control segment. Its state contains the
committed step, and its slot of the next version is empty. optimizerd brings about both
(:mod:`penstock.daemons.optimizer.machine.words`). The third: all gradients of the block are
published in this attempt.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike

from penstock import _native
from penstock.config.training import OptimizerConfig
from penstock.host import world
from penstock.protocol.plan.step import BlockArrays, OptimizerStep, StateArrays, SweepStatus
from penstock.shm.control import INVALID_VERSION
from penstock.shm.layout import WEIGHT_SLOTS
from penstock.shm.memory import Array, NodeMemory
from penstock.workers.state.residents import Residents
from penstock.workers.waiting import POLL_S, Abort, wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewedBlock:
    """The result of a preview, and its start and end (readings of ``time.perf_counter``)."""

    status: SweepStatus
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateScope:
    """The facts that all updates of one attempt share.

    ``done`` is called on the preview thread with each block, after its last byte is written.
    """

    epoch: int
    attempt: int
    step: OptimizerStep
    abort: Abort
    timeout_s: float
    done: Callable[[int, PreviewedBlock], None]


class Previewer(Protocol):
    """A device's way to preview blocks. ``fetch`` and ``preview`` run on a thread each."""

    def issue(self, block: int) -> None:
        """Announces an UPDATE, on the interpreter's thread."""

    def fetch(self, block: int, scope: UpdateScope) -> None:
        """Reads the block's state; the gradients may still be on their way."""

    def preview(self, block: int, scope: UpdateScope) -> PreviewedBlock:
        """Writes the weights of the scope's step into the copy that does not count yet. For a
        flushed block the state is written as well. Returns after the last byte is in host memory.

        Raises:
            Interrupted: aborted; the contents of the slot and that copy are undefined.
        """

    def close(self) -> None:
        """Releases memory and threads."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    block: int
    fetched: Future[None]
    done: Future[None]


class BlockUpdates:
    """The updates of one device. Lives for one epoch.

    Two threads, so that the next block's state comes while a block's weights leave.
    """

    def __init__(self, memory: NodeMemory, previewer: Previewer) -> None:
        self._memory = memory
        self._previewer = previewer
        self._fetching = world.executor(1, "worker-fetch-state")
        self._previewing = world.executor(1, "worker-preview")
        self._under_way: list[_UnderWay] = []

    def start(self, block: int, scope: UpdateScope) -> None:
        """Starts the preview of a block; the preview waits for its conditions."""
        self._previewer.issue(block)
        fetched = self._fetching.submit(self._fetch, block, scope)
        done = self._previewing.submit(self._preview, block, scope, fetched)
        self._under_way.append(_UnderWay(block, fetched, done))

    @property
    def under_way(self) -> Sequence[int]:
        """Blocks with a started preview that is not done."""
        return [work.block for work in self._under_way if not work.done.done()]

    def finish(self, abort: Abort) -> None:
        """Waits until all previews are done. Each has deadlines of its own.

        Raises:
            Interrupted: aborted. LostMemberError: see :mod:`.waiting`. Errors of a preview.
        """
        for work in self._under_way:
            _result(work.done, abort)
        self._under_way.clear()

    def drop(self) -> None:
        """Drops all started previews: nothing is written after the return. The caller has requested
        an abort before, or all previews are done.
        """
        futures = [future for work in self._under_way for future in (work.fetched, work.done)]
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()
        self._under_way.clear()

    def close(self) -> None:
        """Ends the threads and closes the device's previewer."""
        self.drop()
        self._fetching.shutdown(wait=True)
        self._previewing.shutdown(wait=True)
        self._previewer.close()

    def _fetch(self, block: int, scope: UpdateScope) -> None:
        self._await(block, scope, self._settled, self._unsettled)
        self._previewer.fetch(block, scope)

    def _preview(self, block: int, scope: UpdateScope, fetched: Future[None]) -> None:
        _result(fetched, scope.abort)
        self._await(block, scope, self._published, self._unpublished)
        scope.done(block, self._previewer.preview(block, scope))

    def _await(
        self,
        block: int,
        scope: UpdateScope,
        condition: Callable[[int, UpdateScope], bool],
        what: Callable[[int, UpdateScope], str],
    ) -> None:
        wait_until(
            functools.partial(condition, block, scope),
            functools.partial(what, block, scope),
            scope.abort,
            scope.timeout_s,
            lambda: self._memory.control.pin(block) is not None,  # a save reads the state
        )

    def _settled(self, block: int, scope: UpdateScope) -> bool:
        control, version = self._memory.control, scope.step.version
        slot = control.slot_version(block, version % WEIGHT_SLOTS)
        return control.state_version(block) == version - 1 and slot == INVALID_VERSION

    def _unsettled(self, block: int, scope: UpdateScope) -> str:
        control, version = self._memory.control, scope.step.version
        slot = version % WEIGHT_SLOTS
        return (
            f"optimizerd to settle block {block} at version {version - 1} (its state is at"
            f" {control.state_version(block)}) and to vacate its slot {slot} (it holds"
            f" {_slot_text(control.slot_version(block, slot))})"
        )

    def _missing(self, block: int, scope: UpdateScope) -> list[int]:
        partials = range(self._memory.spec.layout.contributions[block])
        current = scope.epoch, scope.attempt
        return [k for k in partials if self._memory.control.ready(block, k) != current]

    def _published(self, block: int, scope: UpdateScope) -> bool:
        return not self._missing(block, scope)

    def _unpublished(self, block: int, scope: UpdateScope) -> str:
        return (
            f"gradients of block {block} in attempt {scope.attempt}: partials"
            f" {self._missing(block, scope)} are not published"
        )


def _result(future: Future[None], abort: Abort) -> None:
    while True:
        abort.check()
        try:
            return future.result(timeout=POLL_S)
        except TimeoutError:
            if future.done():  # a TimeoutError of the work itself
                raise


def _slot_text(version: int) -> str:
    return "nothing" if version == INVALID_VERSION else f"version {version}"


def own_cores(local_index: int) -> list[int]:
    """Returns the cores of this process's updates, as :func:`cores_of`."""
    return cores_of(local_index, torch.get_num_threads(), sorted(os.sched_getaffinity(0)))


def cores_of(worker: int, num_threads: int, available: Sequence[int]) -> list[int]:
    """Returns cores for the threads of a node's ``worker``-th worker. They follow the cores of the
    workers before it, and wrap around after the last core.
    """
    count = min(num_threads, len(available))
    return [available[(worker * count + i) % len(available)] for i in range(count)]


class NativePreviewer:
    """A previewer on shared memory, with optimizerd's kernel and so the same bits.

    Residents bring no gain on this device, but are supported: copies in private memory.
    """

    def __init__(
        self,
        memory: NodeMemory,
        config: OptimizerConfig,
        cores: Sequence[int],
        residents: Collection[int] = (),
        flushed: Collection[int] = (),
    ) -> None:
        """Starts the native threads.

        ``cores``: one thread is pinned to each. ``residents``: blocks with kept state. ``flushed``:
        blocks with a written next state.
        """
        self._config = config
        self._memory = memory
        self._pool = _native.Pool(list(cores))
        self._undo = _mapped(_native.undo_bytes(len(cores)), np.uint8)
        self._arrays: dict[int, BlockArrays] = {}
        self._copies: dict[int, BlockArrays] = {}
        self._wanted = residents
        self._flushed = flushed
        self.residents = Residents(memory.control)

    def issue(self, block: int) -> None:
        """Does nothing: this device prepares nothing."""

    def fetch(self, block: int, scope: UpdateScope) -> None:
        """Does nothing: the state is read in place."""

    def preview(self, block: int, scope: UpdateScope) -> PreviewedBlock:
        """Runs one sweep. A resident with an outdated copy and a flushed block take two. An abort
        waits for their end.
        """
        scope.abort.check()
        arrays = self._arrays.get(block)
        if arrays is None:
            arrays = BlockArrays.of(self._memory, block, self._config)
            self._arrays[block] = arrays
        start_s = world.perf_counter()
        if block in self._wanted:
            arrays = self._of_copy(block, arrays, scope)
        status = arrays.preview(self._pool, scope.step, self._config)
        if block in self._flushed:
            self._flush(arrays, scope.step)
        return PreviewedBlock(status=status, start_s=start_s, end_s=world.perf_counter())

    def close(self) -> None:
        """Ends the threads."""
        self._arrays.clear()
        self._copies.clear()
        self._pool.close()

    def _of_copy(self, block: int, shared: BlockArrays, scope: UpdateScope) -> BlockArrays:
        """Returns ``shared`` with the state of the copy, brought up to the committed version."""
        version = scope.step.version
        copy = self._copies.get(block)
        if copy is None:
            copy = self._copies[block] = _private(shared)
        lag = self.residents.lag(block, version - 1)
        self.residents.forget(block)
        if lag.whole:
            copy.states[0].fill(shared.copy_of(version - 1))
        elif lag.step is not None:
            _native.settle(
                self._pool,
                **copy.state(version - 1),
                grads=copy.grads[0],
                hyper=lag.step.hyper(self._config),
                ranges=copy.ranges,
                undo=self._undo,
            )
        _copy_all(copy.grads[0], shared.gradients(version))
        self.residents.keep(block, version - 1, scope.attempt)
        return replace(shared, states=copy.states)

    def _flush(self, arrays: BlockArrays, step: OptimizerStep) -> None:
        """Writes the state after ``step`` into the copy next to the one that it was read from."""
        arrays.copy_of(step.version).fill(arrays.copy_of(step.version - 1))
        _native.settle(
            self._pool,
            **arrays.state(step.version),
            grads=arrays.gradients(step.version),
            hyper=step.hyper(self._config),
            ranges=arrays.ranges,
            undo=self._undo,
        )


def _private(shared: BlockArrays) -> BlockArrays:
    """Returns room for a copy: state, and one copy of the gradients."""
    master, *arrays = (_mapped(len(array), np.float32) for array in shared.states[0].all)
    return replace(
        shared,
        states=(StateArrays(master=master, arrays=arrays),),
        grads=([_mapped(len(array), array.dtype) for array in shared.grads[0]],),
    )


def _mapped(count: int, dtype: DTypeLike) -> Array:
    """Returns a zeroed array in a mapping of its own, so page-aligned, as native sweeps require."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype=dtype, count=count)


def _copy_all(targets: Iterable[Array], sources: Iterable[Array]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target[:] = source
