"""Copies the weights of a pinned version into a folder, while training continues.

The caller has made the folder. A layout (:mod:`penstock.shm.published`) names the places of tensors
in files that have their sizes already. With a layout, memoryd writes the tensors at their places,
and the files become those of a published model. Without a layout memoryd writes the files of a
saved state, without the optimizer's arrays; the caller converts the files
(:mod:`penstock.client.weights`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from penstock.daemons.memory.disk import DISK, Disk
from penstock.daemons.memory.machine.events import WrittenFile
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.saving import BaseFiles, SettledBlocks, save, written_and_synced
from penstock.daemons.memory.tensorfile import CancelledError
from penstock.host import world
from penstock.host.errors import ConfigError
from penstock.host.files import writing
from penstock.shm.layout import WEIGHT_SLOTS
from penstock.shm.memory import Array, Halves, NodeMemory
from penstock.shm.published import (
    LAYOUT,
    PublishedLayout,
    PublishedTensor,
    pieces,
    source_of,
)
from penstock.shm.table import DType

SYNC_BYTES = 2 << 20
"""Bytes after which the disk begins its work, while further bytes are rounded and written."""


def copy_weights(
    pinned: PinnedVersion,
    directory: Path,
    cancelled: Callable[[], bool],
    *,
    base: BaseFiles | None = None,
    wait: Callable[[], bool] = lambda: False,
    stopping: Callable[[], bool] = lambda: False,
    disk: Disk = DISK,
) -> tuple[WrittenFile, ...]:
    """Copies the weights of the node's blocks; no pin is left. Arguments as of
    :func:`penstock.daemons.memory.saving.save`.

    Raises:
        StateError: a block went past the version, or the layout is damaged.
        CapacityError, ConfigError: the files cannot be written, or the folder is not there.
        CancelledError: on request.
    """
    path = directory / LAYOUT
    if path.is_file():
        with closing(pinned):
            table = pinned.memory.spec.table
            layout = PublishedLayout.from_json(path.read_bytes(), table, str(path))
            return _copy_published(pinned, directory, layout, cancelled, wait, stopping, disk)
    if not directory.is_dir():
        pinned.close()
        raise ConfigError(
            f"{directory}: is not on this machine; give a folder that all nodes of the run share,"
            " such as one in the run directory"
        )
    return save(
        pinned,
        directory,
        cancelled,
        base=base,
        weights_only=True,
        wait=wait,
        stopping=stopping,
        disk=disk,
    )


def _copy_published(
    pinned: PinnedVersion,
    directory: Path,
    layout: PublishedLayout,
    cancelled: Callable[[], bool],
    wait: Callable[[], bool],
    stopping: Callable[[], bool],
    disk: Disk,
) -> tuple[WrittenFile, ...]:
    """Writes the tensors of all blocks that the node owns to their places."""
    memory, homes = pinned.memory, layout.by_block()
    blocks = [block for block in memory.owned_blocks() if block in homes]
    for block in set(memory.owned_blocks()).difference(blocks):
        pinned.let_go(block)
    due = SettledBlocks(pinned, blocks, wait)
    unwritten, lock = Counter(homes[block][0].name for block in blocks), world.lock()

    def write(_: int, stopped: Callable[[], bool]) -> tuple[BinaryIO | None, WrittenFile]:
        block = due.take(stopped)
        published, tensors = homes[block]
        file = disk.reopen(directory / published.name)
        try:
            num_bytes = _write(file, memory, pinned.version, tensors, stopped, disk)
            pinned.check(block)
        except BaseException:
            file.close()
            raise
        pinned.let_go(block)
        written = WrittenFile(name=published.name, num_bytes=num_bytes, sha256="")
        with lock:
            unwritten[published.name] -= 1
            is_last = not unwritten[published.name]
        if is_last:  # once a file, as each forcing waits for the disk
            return file, written
        file.close()
        return None, written

    needed = sum(tensor.num_bytes for block in blocks for tensor in homes[block][1])
    with writing(directory, needed):
        disk.require(directory, needed)
        return tuple(written_and_synced(blocks, write, cancelled, stopping, disk))


def _write(
    file: BinaryIO,
    memory: NodeMemory,
    version: int,
    tensors: Sequence[PublishedTensor],
    stopped: Callable[[], bool],
    disk: Disk,
) -> int:
    """Writes the tensors of a block; returns their bytes."""
    for tensor in tensors:
        values, dtype = _source(memory, version, tensor)
        begun = end = file.seek(tensor.start)
        for piece in pieces(tensor, values, dtype):
            if stopped():
                raise CancelledError
            disk.write(file, piece)
            end += len(piece)
            if end - begun >= SYNC_BYTES:
                disk.begin_sync(file, begun, end - begun)
                begun = end
    return sum(tensor.num_bytes for tensor in tensors)


def _source(
    memory: NodeMemory, version: int, tensor: PublishedTensor
) -> tuple[Array | Halves, DType]:
    """Returns the elements of the tensor that a published one is a view of, in memory.

    Weights of the version are the master rounded to their type, as a restore shows, and need no
    rounding. The upper half of a split master is rounded in another way. While a block is pinned,
    its next state is not settled. Weights that take the slot need that state, so they do not begin.
    A block with two copies of its state has no such order.
    """
    table, block = memory.spec.table, tensor.block
    spec = source_of(tensor, table)
    start, end = spec.offset, spec.offset + spec.num_elements
    if not spec.trainable:
        return memory.frozen(block)[start:end], table.weight_dtype
    slot, copies = version % WEIGHT_SLOTS, memory.spec.layout.state_copies[block]
    if (
        tensor.dtype is table.weight_dtype
        and not memory.split_master
        and copies == 1
        and memory.control.slot_version(block, slot) == version
    ):
        return memory.weights(block, slot)[start:end], table.weight_dtype
    if memory.split_master:
        return memory.halves(block, version).part(start, end), DType.FP32
    return memory.state(block, "master", version)[start:end], DType.FP32
