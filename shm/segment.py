"""POSIX shared-memory segments: create, attach, resize never, unlink.

Only memoryd creates and unlinks. Pages are reserved with ``posix_fallocate`` at creation, so a full
/dev/shm is an error here and never a SIGBUS at first touch later.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import posix_ipc

from penstock.shm.errors import (
    NoSpaceError,
    SegmentExistsError,
    SegmentMissingError,
    ShortSegmentError,
)

SHM_ROOT = Path("/dev/shm")


class Segment:
    """One mapped segment. ``buffer`` is a writable memoryview of exactly ``size`` bytes."""

    def __init__(self, name: str, mapping: mmap.mmap, size: int) -> None:
        self.name = name
        self.size = size
        self._mapping = mapping
        self.buffer = memoryview(mapping)

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """Create, reserve and map ``size`` zero bytes, readable by this user only.

        Raises:
            SegmentExistsError: the name is taken.
            NoSpaceError: /dev/shm cannot hold it; nothing stays behind.
        """
        try:
            shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
        except posix_ipc.ExistentialError as error:
            raise SegmentExistsError(f"segment {name} exists already") from error
        try:
            os.posix_fallocate(shared.fd, 0, size)
            return cls(name, mmap.mmap(shared.fd, size), size)
        except OSError as error:
            posix_ipc.unlink_shared_memory(name)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise NoSpaceError(
                f"segment {name} needs {size} bytes; /dev/shm has {free_bytes()} free:"
                " enlarge /dev/shm, free it (penstock doctor --clean), or train a smaller model"
            ) from error
        finally:
            shared.close_fd()

    @classmethod
    def attach(cls, name: str, expected_size: int | None = None) -> Segment:
        """Map an existing segment.

        Raises:
            SegmentMissingError: no such segment.
            ShortSegmentError: it is empty or smaller than ``expected_size``.
        """
        try:
            shared = posix_ipc.SharedMemory(name)
        except posix_ipc.ExistentialError as error:
            raise SegmentMissingError(f"segment {name} does not exist; is memoryd running?") from error
        try:
            size = os.fstat(shared.fd).st_size
            needed = max(1, expected_size or 0)
            if size < needed:
                raise ShortSegmentError(f"segment {name} has {size} bytes, its layout needs {needed}")
            return cls(name, mmap.mmap(shared.fd, size), size)
        finally:
            shared.close_fd()

    def close(self) -> None:
        """Unmap. Views handed out before must be gone; those still alive keep the mapping until they go."""
        self.buffer.release()
        try:
            self._mapping.close()
        except BufferError:
            # NumPy views are alive (for example in a worker's tensors): the mapping ends with the last of them.
            return

    def unlink(self) -> None:
        """Remove the name. Processes that have it mapped keep their mapping."""
        unlink(self.name)


def unlink(name: str) -> None:
    """Remove a segment's name; one that is gone already is fine."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return


def exists(name: str) -> bool:
    """Whether a segment of this name exists."""
    return (SHM_ROOT / name.lstrip("/")).exists()


def list_segments(prefix: str = "/penstock-") -> list[str]:
    """Names of the segments on this machine that start with ``prefix``, sorted."""
    return sorted("/" + path.name for path in SHM_ROOT.glob(prefix.lstrip("/") + "*"))


def free_bytes() -> int:
    """Bytes that /dev/shm can still hold."""
    status = os.statvfs(SHM_ROOT)
    return status.f_bavail * status.f_frsize
