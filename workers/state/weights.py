"""Weights of stages: from FETCH_WEIGHTS to RELEASE_WEIGHTS.

Blocks of this node are read from shared memory as soon as their version is committed. Blocks of
other nodes are fetched from their owner on a background thread. A tied tensor is a view of its
owner's arrays, which arrive with the stage that needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.host import world
from penstock.host.errors import ProtocolError
from penstock.protocol.plan.instructions import FetchWeights, Phase, Program, ReleaseWeights
from penstock.protocol.wire.blocks import BlockClient, FetchCancelledError
from penstock.protocol.wire.fetching import OpenFetcher
from penstock.protocol.wire.frames import BlockRequest
from penstock.shm.layout import Ownership
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable, BorrowedTensor
from penstock.workers.device import (
    BufferPool,
    Copied,
    Device,
    HostArray,
    StageBuffer,
    Stamp,
)
from penstock.workers.state.scope import AttemptScope
from penstock.workers.waiting import POLL_S, Interrupted, wait_until

ArrayName = Literal["weights", "frozen"]


@dataclass(frozen=True, slots=True)
class ArrayId:
    """One flat array of one block."""

    block: int
    name: ArrayName


@dataclass(frozen=True, slots=True)
class StageKey:
    """A weight buffer, as FETCH_WEIGHTS names it."""

    stage: int
    phase: Phase


class LoadedStage:
    """A stage with all of its weights on the device."""

    def __init__(self, ids: Sequence[ArrayId], buffer: StageBuffer) -> None:
        self._arrays = dict(zip(ids, buffer.tensors, strict=True))
        self._buffer = buffer

    def array(self, block: int, name: ArrayName) -> torch.Tensor | None:
        """Returns the flat tensor, or None if the block has no such array."""
        return self._arrays.get(ArrayId(block, name))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All its arrays."""
        return self._buffer.tensors

    def release(self) -> None:
        """Releases the memory; tensors handed out before must be gone."""
        self._arrays.clear()
        self._buffer.release()


def tied_owner(table: BlockTable, tied: BorrowedTensor) -> ArrayId:
    """Returns the owner's array that holds a tied tensor."""
    tensor = next(t for t in table.blocks[tied.owner].tensors if t.name == tied.name)
    return ArrayId(tied.owner, "weights" if tensor.trainable else "frozen")


def arrays_of(table: BlockTable, blocks: Sequence[int]) -> tuple[ArrayId, ...]:
    """Returns every array that computing ``blocks`` reads, each once, without empty ones."""
    arrays: dict[ArrayId, None] = {}
    for block in (table.blocks[index] for index in blocks):
        if block.trainable_elements:
            arrays[ArrayId(block.index, "weights")] = None
        if block.frozen_elements:
            arrays[ArrayId(block.index, "frozen")] = None
        arrays |= dict.fromkeys(tied_owner(table, tied) for tied in block.borrows)
    return tuple(arrays)


def num_elements(table: BlockTable, array: ArrayId) -> int:
    """Returns the elements of an array, padding included."""
    block = table.blocks[array.block]
    return block.trainable_elements if array.name == "weights" else block.frozen_elements


def stage_bytes(table: BlockTable, blocks: Sequence[int], alignment: int) -> int:
    """Returns the bytes of a stage's weights in storage types, every array aligned to ``alignment``
    bytes.
    """
    itemsize = table.weight_dtype.itemsize
    sizes = (num_elements(table, array) * itemsize for array in arrays_of(table, blocks))
    return sum(-(-size // alignment) * alignment for size in sizes)


def buffers_needed(*programs: Program) -> int:
    """Returns the largest number of stages with weights on a device at one time, over all its
    programs.
    """
    most = 0
    for program in programs:
        held = 0
        for instruction in program:
            held += (type(instruction) is FetchWeights) - (type(instruction) is ReleaseWeights)
            most = max(most, held)
    return most


class RemoteBlocks:
    """Copies of arrays that other nodes own. Used on one thread at a time."""

    def __init__(
        self,
        run_id: str,
        table: BlockTable,
        addresses: Mapping[int, str],
        open_fetcher: OpenFetcher = BlockClient,
    ) -> None:
        """Opens a client. ``addresses``: memoryd's block server by node."""
        self._run_id = run_id
        self._table = table
        self._addresses = dict(addresses)
        self._pool = BufferPool()
        self._context = world.sockets()
        self._client = open_fetcher(self._context)

    def fetch(self, node: int, array: ArrayId, scope: AttemptScope) -> HostArray:
        """Returns a private copy (bytes); :meth:`give` takes it back.

        Raises:
            Interrupted: aborted. LostMemberError: not available in time. ProtocolError: refused.
        """
        address = self._addresses.get(node)
        if not address:
            raise ProtocolError(f"the last Begin names no block server of node {node}")
        num_bytes = num_elements(self._table, array) * self._table.weight_dtype.itemsize
        out = self._pool.take(num_bytes, torch.uint8).numpy()
        request = BlockRequest(
            run_id=self._run_id,
            epoch=scope.epoch,
            attempt=scope.attempt,
            array=array.name,
            block=array.block,
            version=scope.base_version,
            contribution=0,
            offset=0,
            num_bytes=0,
        )
        try:
            self._client.fetch(
                address,
                request,
                out,
                timeout_s=scope.timeout_s,
                cancelled=lambda: scope.abort.is_set,
            )
        except FetchCancelledError as error:
            raise Interrupted(str(error)) from error
        return out

    def give(self, array: HostArray) -> None:
        """Takes back a copy, which may be overwritten from now on."""
        self._pool.give(torch.from_numpy(array))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
        self._context.term()


class _StageFetch:
    """One stage's weights on their way: ``arrive`` on the host, then ``load`` onto the device."""

    def __init__(
        self, loader: WeightLoader, key: StageKey, ids: tuple[ArrayId, ...], scope: AttemptScope
    ) -> None:
        self._loader = loader
        self._key = key
        self.ids = ids
        self._scope = scope
        self._future: Future[list[HostArray]] | None = None
        self._early: StageBuffer | None = None
        self._stage: LoadedStage | None = None
        self._copies: list[HostArray] = []

    def start(self, submit: Callable[..., Future[list[HostArray]]], load: bool) -> None:
        """Starts the fetch on the background thread. Without this call :meth:`wait` does all the
        work.
        """
        self._future = submit(self._arrive_and_load if load else self._arrive_beside)

    def wait(self) -> LoadedStage:
        """Returns the loaded stage after its arrival."""
        if self._stage is None:
            arrays = self._arrive() if self._future is None else self._result(self._future)
            buffer = self._early or self._load(arrays)
            buffer.acquire()
            self._stage = LoadedStage(self.ids, buffer)
        return self._stage

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors on the device so far."""
        if self._stage is not None:
            return self._stage.tensors
        return () if self._early is None else self._early.tensors

    def release(self) -> None:
        """Frees the device's buffer, then the host's copies."""
        if self._future is not None and self._stage is None:
            # The stage was never used: the background thread may still be writing.
            self._future.exception()
        if self._stage is not None:
            self._stage.release()
        elif self._early is not None:
            self._early.release()
        for copy in self._copies:
            self._loader.remote.give(copy)
        self._copies.clear()

    def _result(self, future: Future[list[HostArray]]) -> list[HostArray]:
        while True:
            self._scope.abort.check()
            try:
                return future.result(timeout=POLL_S)
            except TimeoutError:
                if future.done():  # a TimeoutError of the work itself
                    raise

    def _load(self, arrays: list[HostArray]) -> StageBuffer:
        buffer = self._copy(arrays)
        self._loaded(*buffer.loaded, early=False)
        return buffer

    def _copy(self, arrays: list[HostArray]) -> StageBuffer:
        buffer = self._loader.device.load(arrays)
        if buffer.copied_bytes:
            self._scope.copied("h2d", "weights", Copied(buffer.copied_bytes, *buffer.loaded))
        return buffer

    def _arrive_beside(self) -> list[HostArray]:
        start = world.perf_counter()
        arrays = self._arrive()
        self._loaded(start, world.perf_counter(), early=True)
        return arrays

    def _arrive_and_load(self) -> list[HostArray]:
        start = world.perf_counter()
        arrays = self._arrive()
        self._early = self._copy(arrays)
        begun, ended = self._early.loaded
        # Arrays from other nodes are on their way before they are copied to the device.
        self._loaded(start if self._copies else begun, ended, early=True)
        return arrays

    def _loaded(self, start: Stamp, end: Stamp, *, early: bool) -> None:
        self._scope.loaded(self._key.stage, self._key.phase, start, end, early=early)

    def _arrive(self) -> list[HostArray]:
        return [self._array(array) for array in self.ids]

    def _array(self, array: ArrayId) -> HostArray:
        loader, scope = self._loader, self._scope
        owner = loader.ownership.owner[array.block]
        if owner != loader.node:
            copy = loader.remote.fetch(owner, array, scope)
            self._copies.append(copy)
            return copy
        control = loader.memory.control
        if array.name == "frozen":
            return loader.memory.frozen(array.block)
        wait_until(
            functools.partial(control.readable, array.block, scope.base_version),
            lambda: (
                f"weights of block {array.block} at version {scope.base_version}: committed is"
                f" {control.committed}, its slot holds"
                f" {control.slot_version(array.block, scope.base_version % 2)}"
            ),
            scope.abort,
            scope.timeout_s,
            lambda: control.pin(array.block) is not None,  # a save reads the state
        )
        return loader.memory.weights(array.block, scope.base_version % 2)


class WeightLoader:
    """Fetches, keeps and releases the weights of the stages in use. Lives for one epoch."""

    def __init__(
        self,
        *,
        table: BlockTable,
        memory: NodeMemory,
        ownership: Ownership,
        node: int,
        device: Device,
        remote: RemoteBlocks,
    ) -> None:
        self.table = table
        self.memory = memory
        self.ownership = ownership
        self.node = node
        self.device = device
        self.remote = remote
        self._fetches: dict[StageKey, _StageFetch] = {}
        self._executor = world.executor(1, "worker-weights")

    def fetch(self, key: StageKey, blocks: Sequence[int], scope: AttemptScope) -> None:
        """Starts to fetch a stage's weights."""
        if key in self._fetches:
            raise ProtocolError(f"weights of {key.phase} stage {key.stage} are fetched already")
        ids = arrays_of(self.table, blocks)
        fetch = _StageFetch(self, key, ids, scope)
        remote = any(self.ownership.owner[array.block] != self.node for array in ids)
        if self.device.prefetches or remote:
            fetch.start(self._executor.submit, load=self.device.prefetches)
        self._fetches[key] = fetch

    def has(self, key: StageKey) -> bool:
        """Returns True if the stage is fetched and not released."""
        return key in self._fetches

    def use(self, key: StageKey) -> LoadedStage:
        """Returns the stage's weights after their arrival.

        Raises:
            ProtocolError: never fetched. Interrupted, LostMemberError: see :mod:`.waiting`.
        """
        if key not in self._fetches:
            raise ProtocolError(f"weights of {key.phase} stage {key.stage} are not fetched")
        return self._fetches[key].wait()

    def release(self, key: StageKey) -> None:
        """Releases the stage's buffer."""
        if key not in self._fetches:
            raise ProtocolError(f"weights of {key.phase} stage {key.stage} are not fetched")
        self._fetches.pop(key).release()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Flat weights on the device now, of all stages; read on the interpreter's thread."""
        return tuple(t for fetch in self._fetches.values() for t in fetch.tensors)

    @property
    def coming_elements(self) -> int:
        """Elements of stages that are fetched and not on the device yet."""
        coming = (fetch.ids for fetch in self._fetches.values() if not fetch.tensors)
        return sum(num_elements(self.table, array) for ids in coming for array in ids)

    @property
    def in_use(self) -> tuple[StageKey, ...]:
        """Stages fetched and not released."""
        return tuple(self._fetches)

    def drop(self) -> None:
        """Releases everything, in any state; an abort has been requested or the attempt is over."""
        while self._fetches:
            self._fetches.popitem()[1].release()

    def close(self) -> None:
        """Releases everything and ends the background thread."""
        self.drop()
        self._executor.shutdown(wait=True)
        self.remote.close()
