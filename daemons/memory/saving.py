"""Writes a node's part of a saved state, while training continues.

::

    pinned --settled--> read, checked, written -released-> forced to disk
      |                                           |
      no sweep may overwrite the version          sweeps go on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

from penstock.daemons.memory.disk import DISK, Disk
from penstock.daemons.memory.machine.events import WrittenFile
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.snapshot import block_file, block_tensors, in_parallel
from penstock.daemons.memory.tensorfile import CancelledError, write_tensors
from penstock.host import world
from penstock.host.files import writing

SYNC_POLL_S = 0.005
LEFT_FREE_BYTES = 64 << 20
"""Bytes of the disk that a save leaves to the journal and the logs. A smaller save leaves as many
bytes as it writes."""


def save(
    pinned: PinnedVersion,
    directory: Path,
    cancelled: Callable[[], bool],
    *,
    wait: Callable[[], bool] = lambda: False,
    stopping: Callable[[], bool] = lambda: False,
    disk: Disk = DISK,
) -> tuple[WrittenFile, ...]:
    """Writes all blocks of a pinned version that the node owns; no pin is left.

    Blocks are written as they settle. When none is ready, ``wait()`` blocks briefly and returns
    True to give up. The last settled block is written first, because backward passes reach it
    first and its next sweep is due first. A block is released after its last byte has been handed
    to the kernel; another thread forces it to disk. ``stopping()`` returns the same as
    ``cancelled()``, but a call does not count as progress.

    Raises:
        StateError: a block went past the version.
        CapacityError, ConfigError: the files cannot be written; none of them is left behind.
        CancelledError: on request.
    """
    memory, version = pinned.memory, pinned.version
    blocks = memory.owned_blocks()
    specs = memory.spec.table.blocks
    due = SettledBlocks(pinned, blocks, wait)
    sizes = {
        block: sum(tensor.num_bytes for tensor in block_tensors(memory, specs[block], version))
        for block in blocks
    }
    needed = sum(sizes.values())
    left_free = min(LEFT_FREE_BYTES, needed)

    def write(_: int, stopped: Callable[[], bool]) -> tuple[BinaryIO, WrittenFile]:
        block = due.take(stopped)
        path = directory / block_file(block)
        disk.require(directory, sizes[block] + left_free)  # other nodes may write there as well
        file = disk.create(path)
        try:
            tensors = block_tensors(memory, specs[block], version)
            written = write_tensors(file, path.name, tensors, stopped, disk)
            pinned.check(block)
        except BaseException:
            file.close()
            raise
        pinned.let_go(block)
        return file, written

    with closing(pinned), writing(directory, needed + left_free):
        disk.make_directory(directory)
        try:
            disk.require(directory, needed + left_free)
            files = _written_and_synced(blocks, write, cancelled, stopping, disk)
        except BaseException:
            for block in blocks:
                (directory / block_file(block)).unlink(missing_ok=True)
            raise
        disk.sync_names(directory)
    return tuple(sorted(files, key=lambda file: file.name))


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


def _written_and_synced(
    blocks: Sequence[int],
    write: Callable[[int, Callable[[], bool]], tuple[BinaryIO, WrittenFile]],
    cancelled: Callable[[], bool],
    stopping: Callable[[], bool],
    disk: Disk,
) -> list[WrittenFile]:
    """Writes all files, and forces each to disk while the next ones are written."""
    with ExitStack() as opened, world.executor(1, "sync") as syncing:
        synced: list[Future[None]] = []

        def sync(file: BinaryIO) -> None:
            disk.sync(file)
            file.close()

        def write_and_sync(number: int, stopped: Callable[[], bool]) -> WrittenFile:
            file, written = write(number, stopped)
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
