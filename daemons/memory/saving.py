"""Writes a node's part of a saved state, while training continues.

::

    pinned --settled--> read, checked, written -released-> forced to disk
      |                                           |
      no sweep may overwrite the version          sweeps go on

Then the frozen tensors, which no sweep changes, become the run's base, unless an earlier save has
written it. A file of the base is written and forced to disk in the folder of the unfinished state.
Only then is the file renamed into the folder of the base. After a kill the scheduler removes
unfinished states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from penstock.daemons.memory.disk import DISK, Disk
from penstock.daemons.memory.machine.events import WrittenFile
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.snapshot import (
    block_file,
    frozen_tensors,
    in_parallel,
    trained_tensors,
)
from penstock.daemons.memory.tensorfile import (
    CancelledError,
    TensorBytes,
    digest_of,
    file_bytes,
    write_tensors,
)
from penstock.host import world
from penstock.host.files import writing
from penstock.protocol.run.saved_base import base_file, base_folder
from penstock.shm.memory import NodeMemory

SYNC_POLL_S = 0.005
LEFT_FREE_BYTES = 64 << 20
"""Bytes of the disk that a save leaves to the journal and the logs. A smaller save leaves as many
bytes as it writes."""

BaseFiles = MutableMapping[int, WrittenFile]
"""Files of the base by block, as far as the checksums of the frozen tensors in memory are known."""


def save(
    pinned: PinnedVersion,
    directory: Path,
    cancelled: Callable[[], bool],
    *,
    base: BaseFiles | None = None,
    weights_only: bool = False,
    wait: Callable[[], bool] = lambda: False,
    stopping: Callable[[], bool] = lambda: False,
    disk: Disk = DISK,
) -> tuple[WrittenFile, ...]:
    """Writes all blocks of a pinned version that the node owns; no pin is left.

    Blocks are written as they settle. When none is ready, ``wait()`` blocks briefly and returns
    True to give up. The last settled block is written first, because backward passes reach it
    first and its next sweep is due first. A block is released after its last byte has been handed
    to the kernel; another thread forces it to disk. ``stopping()`` returns the same as
    ``cancelled()``, but a call does not count as progress. ``base`` has the checksums of frozen
    tensors that earlier jobs computed; others are added. ``weights_only``: no optimizer's arrays.

    Raises:
        StateError: a block went past the version.
        CapacityError, ConfigError: the files cannot be written; none of them is left behind.
        CancelledError: on request.
    """
    memory, blocks = pinned.memory, pinned.memory.owned_blocks()
    due, specs = SettledBlocks(pinned, blocks, wait), memory.spec.table.blocks

    def trained(block: int) -> tuple[TensorBytes, ...]:
        return trained_tensors(memory, specs[block], pinned.version, weights_only=weights_only)

    sizes = {block: sum(tensor.num_bytes for tensor in trained(block)) for block in blocks}
    needed = sum(sizes.values())
    left_free = min(LEFT_FREE_BYTES, needed)

    def write(_: int, stopped: Callable[[], bool]) -> tuple[BinaryIO, WrittenFile]:
        block = due.take(stopped)
        path = directory / block_file(block)
        disk.require(directory, sizes[block] + left_free)  # other nodes may write there as well
        file = disk.create(path)
        try:
            written = write_tensors(file, path.name, trained(block), stopped, disk)
            pinned.check(block)
        except BaseException:
            file.close()
            raise
        pinned.let_go(block)
        return file, written

    try:
        with closing(pinned), writing(directory, needed + left_free):
            disk.make_directory(directory)
            disk.require(directory, needed + left_free)
            files = written_and_synced(blocks, write, cancelled, stopping, disk)
            disk.sync_names(directory)
        files += _keep(memory, {} if base is None else base, directory, cancelled, stopping, disk)
    except BaseException:
        _take_back(directory, blocks)
        raise
    return tuple(sorted(files, key=lambda file: file.name))


def _take_back(directory: Path, blocks: Sequence[int]) -> None:
    """Removes the files of a save that failed."""
    for block in blocks:
        for name in (block_file(block), _temporary(block)):
            (directory / name).unlink(missing_ok=True)


def _keep(
    memory: NodeMemory,
    known: BaseFiles,
    directory: Path,
    cancelled: Callable[[], bool],
    stopping: Callable[[], bool],
    disk: Disk,
) -> list[WrittenFile]:
    """Writes the frozen tensors of the node's blocks into the base, where the base lacks them."""
    folder, specs = base_folder(directory), memory.spec.table.blocks
    owned = (block for block in memory.owned_blocks() if specs[block].frozen_elements)
    frozen = {block: frozen_tensors(memory, specs[block]) for block in owned}
    sizes = {block: file_bytes(frozen[block]) for block in frozen}
    unknown = [block for block in frozen if block not in known and _may_have(folder, block, sizes)]

    def digest(block: int, stopped: Callable[[], bool]) -> None:
        file = digest_of("", frozen[block], stopped)
        known[block] = replace(file, name=base_file(block, file.sha256), base=True, reused=True)

    in_parallel(unknown, digest, cancelled)
    due = [b for b in frozen if b not in known or _size(folder / known[b].name) != sizes[b]]
    needed = sum(sizes[block] for block in due)
    left_free = min(LEFT_FREE_BYTES, needed)
    temporary = {block: directory / _temporary(block) for block in due}
    reused = [known[block] for block in frozen if block not in due]
    if not due:
        return reused

    def write(block: int, stopped: Callable[[], bool]) -> tuple[BinaryIO, WrittenFile]:
        disk.require(directory, sizes[block] + left_free)
        file = disk.create(temporary[block])
        try:
            written = write_tensors(file, "", frozen[block], stopped, disk)
        except BaseException:
            file.close()
            raise
        return file, replace(written, name=base_file(block, written.sha256), base=True)

    with writing(folder, needed + left_free):
        disk.require(directory, needed + left_free)
        files = written_and_synced(due, write, cancelled, stopping, disk)
        if not folder.is_dir():
            disk.make_directory(folder)
            disk.sync_names(folder.parent)
        # Content first, then the name: a file of the base is complete at any instant.
        for block, file in zip(due, files, strict=True):
            disk.rename(temporary[block], folder / file.name)
            known[block] = replace(file, reused=True)
        disk.sync_names(folder)
    return reused + files


def _temporary(block: int) -> str:
    return f"base-{block:04d}"


def _may_have(folder: Path, block: int, sizes: Mapping[int, int]) -> bool:
    """Returns whether a base has a file with the size of a block's frozen tensors."""
    return any(_size(path) == sizes[block] for path in folder.glob(base_file(block, "*")))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


class SettledBlocks:
    """Hands out the blocks of a pinned version, each once, when it has been settled."""

    def __init__(
        self, pinned: PinnedVersion, blocks: Iterable[int], wait: Callable[[], bool]
    ) -> None:
        self._pinned = pinned
        self._left = sorted(blocks, reverse=True)
        self._wait = wait
        # Held while it waits, so that further callers wait for the same event.
        self._lock = world.lock()

    def take(self, stopped: Callable[[], bool]) -> int:
        """Returns the next block; there is one for each call.

        Raises:
            StateError: a block is past the version.
            CancelledError: on request.
        """
        with self._lock:
            while not stopped():
                for block in self._left:
                    if self._pinned.is_there(block):
                        self._left.remove(block)
                        return block
                if self._wait():
                    break
        raise CancelledError


def written_and_synced(
    blocks: Sequence[int],
    write: Callable[[int, Callable[[], bool]], tuple[BinaryIO | None, WrittenFile]],
    cancelled: Callable[[], bool],
    stopping: Callable[[], bool],
    disk: Disk,
) -> list[WrittenFile]:
    """Writes all files, and forces each to disk while the next ones are written. ``write`` returns
    no file where a later block forces its file to disk.
    """
    with ExitStack() as opened, world.executor(1, "sync") as syncing:
        synced: list[Future[None]] = []

        def sync(file: BinaryIO) -> None:
            disk.sync(file)
            file.close()

        def write_and_sync(number: int, stopped: Callable[[], bool]) -> WrittenFile:
            file, written = write(number, stopped)
            if file is not None:
                opened.callback(file.close)
                synced.append(syncing.submit(sync, file))
            return written

        try:
            files = in_parallel(blocks, write_and_sync, cancelled)
            for one in synced:
                while not one.done():
                    if stopping():
                        raise CancelledError
                    world.sleep(SYNC_POLL_S)
                one.result()
        except BaseException:
            syncing.shutdown(wait=False, cancel_futures=True)
            raise
    return files
