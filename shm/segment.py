"""POSIX shared-memory segments: create, attach, unlink; they are never resized.

Only memoryd creates and unlinks. ``posix_fallocate`` reserves all pages at creation, so a full
/dev/shm is an error here and never a SIGBUS later. The kernel zeroes reserved pages at first touch
(measured: 1 GB/s, against 10 GB/s for reserving). Every process fills its own page tables (10-40
GB/s). Both happen while a segment is created or attached, so that no step ever waits for them. Huge
pages are always advised. Where /dev/shm grants huge pages, pages are touched first, because a
reservation alone makes small pages.

A segment may bear a token: random bytes in the page after its arrays, which is never mapped. The
control segment holds the token, so a file that merely has the name is not taken for the segment.

A :class:`SegmentError` means that nothing was touched.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import posix_ipc

from penstock.host.limits.cgroup import (
    MemoryLimit,
    MemoryUnknownError,
    tightest_memory,
    usable_cpus,
)
from penstock.host.trust import UntrustedError, objection, open_own
from penstock.shm.pages import HugePages, NodeRange, allowed_huge_pages, prefer_nodes_if_granted


class SegmentError(Exception):
    """A segment cannot be used; the message names it and a remedy."""


class SegmentMissingError(SegmentError):
    """No segment of that name exists."""


class SegmentExistsError(SegmentError):
    """A segment of that name exists already."""


class BadHeaderError(SegmentError):
    """The control segment does not start with our magic number."""


class VersionMismatchError(SegmentError):
    """The control segment was written in another format version."""


class ShortSegmentError(SegmentError):
    """The segment is shorter than its layout."""


class ForeignOwnerError(SegmentError):
    """The segment belongs to another run, layout, or living process."""


class StrangeSegmentError(SegmentError):
    """The name is taken by something that is no private segment of this user; nothing was read."""


class NoSpaceError(SegmentError):
    """/dev/shm, the machine or a control group has no room for the segment."""


SHM_ROOT = Path("/dev/shm")
TOKEN_BYTES = 16
TOKEN_PAGE_BYTES = mmap.PAGESIZE
"""Bytes that a file with a token has after the bytes that are mapped."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; mmap has no names for them
_POPULATE_CHUNK_BYTES = 256 << 20
_BLOCK_BYTES = 512  # unit of st_blocks

# EFAULT: populating met what would have been a SIGBUS.
OUT_OF_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFAULT)


class Segment:
    """One mapped segment. ``buffer`` is a writable memoryview of exactly ``size`` bytes."""

    def __init__(self, name: str, mapping: mmap.mmap, size: int, inode: int) -> None:
        self.name = name
        self.size = size
        self._inode = inode
        self._mapping: mmap.mmap | None = mapping
        self.buffer = memoryview(mapping)

    @classmethod
    def create(
        cls, name: str, size: int, places: Sequence[NodeRange] = (), token: bytes = b""
    ) -> Segment:
        """Creates, reserves, maps and populates ``size`` zero bytes, accessible to this user only.

        ``places``: NUMA nodes for ranges of the segment, as far as the kernel grants them.
        ``token``: random bytes by which the segment is recognised, if any.

        Raises:
            NoSpaceError: no room is left; no part of the segment stays.
        """
        available = room()
        if size > available.available:  # reserving more would wake the out-of-memory killer
            raise no_space(name, size, available)
        try:
            shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
        except posix_ipc.ExistentialError as error:
            refuse_stranger(name)
            raise SegmentExistsError(f"segment {name} exists already") from error
        except (OSError, posix_ipc.Error) as error:
            raise SegmentError(f"segment {name} cannot be made in {SHM_ROOT}: {error}") from error
        try:
            mapping = reserve_and_map(shared.fd, size, places, TOKEN_PAGE_BYTES if token else 0)
            os.pwrite(shared.fd, token, size)
            return cls(name, mapping, size, os.fstat(shared.fd).st_ino)
        except BaseException as error:
            unlink(name)
            if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
                raise no_space(name, size, room()) from error
            raise
        finally:
            shared.close_fd()

    @classmethod
    def attach(
        cls,
        name: str,
        expected_size: int | None = None,
        *,
        writable: bool = True,
        token: bytes | None = None,
    ) -> Segment:
        """Maps an existing segment and fills this process's page tables. ``token``: bytes that the
        segment must bear after ``expected_size``; None: no check.

        Raises:
            SegmentMissingError: no such segment exists.
        """
        descriptor = open_segment(name, os.O_RDWR if writable else os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            needed = max(1, expected_size or 0)
            if status.st_size < needed:
                raise ShortSegmentError(
                    f"segment {name} has {status.st_size} bytes, its layout needs {needed}"
                )
            if status.st_blocks * _BLOCK_BYTES < status.st_size:
                raise ShortSegmentError(
                    f"segment {name} has {status.st_size} bytes, of which only"
                    f" {status.st_blocks * _BLOCK_BYTES} are reserved"
                )
            size = status.st_size if expected_size is None else expected_size
            if token is not None and os.pread(descriptor, TOKEN_BYTES, size) != token:
                raise StrangeSegmentError(
                    f"segment {name} does not bear the token of this memory: it is not the segment"
                    " that memoryd made"
                )
            mapping = _map(descriptor, size, writable=writable)
            return cls(name, mapping, size, status.st_ino)
        finally:
            os.close(descriptor)

    def mark(self, token: bytes) -> None:
        """Writes a token into a segment of an older Penstock.

        Raises:
            NoSpaceError: there is no room for one more page. StrangeSegmentError: the name is
                taken by another file.
        """
        descriptor = open_segment(self.name, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_ino != self._inode:
                raise StrangeSegmentError(f"segment {self.name} was replaced by another file")
            os.posix_fallocate(descriptor, self.size, TOKEN_PAGE_BYTES)
            os.pwrite(descriptor, token, self.size)
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise no_space(self.name, TOKEN_PAGE_BYTES, room()) from error
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmaps the segment. Live NumPy views keep the mapping until the last view is freed."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        try:
            self.buffer.release()
            mapping.close()
        except BufferError:
            # The memory stays valid for the views that are left, for example a worker's tensors;
            # the mapping, no longer referred to here, is freed with the last of them.
            return

    def unlink(self) -> None:
        """Removes the name. Processes that have it mapped keep their mapping."""
        unlink(self.name)

    @property
    def is_named(self) -> bool:
        """True if the name still leads to this segment; another segment may have the name by
        now.
        """
        status = status_of(self.name)
        return status is not None and status.st_ino == self._inode


def open_segment(name: str, flags: int) -> int:
    """Opens a segment of this user and returns its descriptor. Every reader of segments does so.

    Raises:
        SegmentMissingError: no such segment.
        StrangeSegmentError: the name leads to something else than a private file of this user.
    """
    try:
        return open_own(path_of(name), flags)
    except FileNotFoundError as error:
        raise SegmentMissingError(f"segment {name} does not exist; is memoryd running?") from error
    except UntrustedError as error:
        raise StrangeSegmentError(str(error)) from error
    except OSError as error:
        raise StrangeSegmentError(f"{path_of(name)}: cannot be opened: {error.strerror}") from error


def path_of(name: str) -> Path:
    """Returns the path of a segment as a file."""
    return SHM_ROOT / name.removeprefix("/")


def status_of(name: str) -> os.stat_result | None:
    """Returns the status of a name in /dev/shm, without following links; None: there is no file."""
    try:
        return os.lstat(path_of(name))
    except FileNotFoundError:
        return None


def is_own(status: os.stat_result | None) -> bool:
    """Returns whether a file is of this user; its mode and links are not checked."""
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def refuse_stranger(name: str) -> None:
    """Refuses a name that something else than a private file of this user has; a free one is fine.

    Raises:
        StrangeSegmentError: names the user and the type of the file.
    """
    status = status_of(name)
    reason = "" if status is None else objection(status)
    if reason:
        raise StrangeSegmentError(f"{path_of(name)} {reason}")


def unlink(name: str) -> None:
    """Removes the name of a segment of this user. A name that is gone is fine, and a name that
    something else has taken is left alone.
    """
    if is_own(status_of(name)):
        with suppress(FileNotFoundError, PermissionError):  # since taken by another user
            os.unlink(path_of(name))


def exists(name: str) -> bool:
    """Returns whether this user has a segment of this name."""
    return is_own(status_of(name))


def list_segments(prefix: str = "/penstock-") -> list[str]:
    """Returns the names in /dev/shm that start with ``prefix``, sorted, of files of any kind."""
    return sorted("/" + name for name in os.listdir(SHM_ROOT) if name.startswith(prefix[1:]))


def free_bytes() -> int:
    """Returns the bytes that /dev/shm can still hold by its own limit."""
    status = os.statvfs(SHM_ROOT)
    return status.f_bavail * status.f_frsize


def room() -> MemoryLimit:
    """Returns the tightest limit of a new segment: /dev/shm, the machine, or a control group."""
    free = free_bytes()
    shm = MemoryLimit(owner=str(SHM_ROOT), limit=free, available=free)
    try:
        return min(shm, tightest_memory(), key=lambda limit: limit.available)
    except MemoryUnknownError:
        return shm


def no_space(name: str, size: int, there: MemoryLimit) -> NoSpaceError:
    """Returns the error that names the bytes that are needed, and that are free."""
    return NoSpaceError(
        f"segment {name} needs {size} bytes; {there.owner} has {there.available} free: enlarge"
        " that, free it (penstock doctor --clean), or train a smaller model"
    )


def reserve_and_map(
    descriptor: int, size: int, places: Sequence[NodeRange], trailer: int
) -> mmap.mmap:
    """Gives a new file ``size`` bytes, which are mapped and populated, and a ``trailer`` of bytes.

    Raises:
        OSError: there is no room.
    """
    os.ftruncate(descriptor, size + trailer)
    if places:
        # In a mapping of its own: the policy stays with the memory, the mapping that is used is
        # not cut into one for each range.
        with mmap.mmap(descriptor, size) as mapping:
            prefer_nodes_if_granted(mapping, places)
    if allowed_huge_pages(SHM_ROOT) is HugePages.NEVER:
        os.posix_fallocate(descriptor, 0, size + trailer)
        return _map(descriptor, size)
    # Touch before the reservation, which would fill the segment with small pages.
    mapping = _map(descriptor, size)
    os.posix_fallocate(descriptor, 0, size + trailer)
    return mapping


def _map(descriptor: int, size: int, *, writable: bool = True) -> mmap.mmap:
    if writable:
        mapping = mmap.mmap(descriptor, size)
    else:
        mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    try:
        _populate(mapping, size, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _populate(mapping: mmap.mmap, size: int, advice: int) -> None:
    """Touches every page, on all CPUs this process may use. Contents do not change."""
    anchor = np.frombuffer(mapping, dtype=np.uint8)  # keeps the mapping from being closed meanwhile
    try:
        _touch(anchor.ctypes.data, size, advice)
    finally:
        del anchor  # also from the frame of an error: the caller closes the mapping


def populate_read(address: int, size: int) -> None:
    """Maps every page of a range for reading, on all CPUs this process may use."""
    _touch(address, size, _MADV_POPULATE_READ)


def _touch(base: int, size: int, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(base, size, mmap.MADV_HUGEPAGE)  # advice: a kernel without them says EINVAL

    def populate_chunk(start: int) -> int:
        length = min(_POPULATE_CHUNK_BYTES, size - start)
        failed = libc.madvise(base + start, length, advice) != 0
        return ctypes.get_errno() if failed else 0

    with ThreadPoolExecutor(usable_cpus()) as pool:
        results = list(pool.map(populate_chunk, range(0, size, _POPULATE_CHUNK_BYTES)))
    for error in results:
        # EINVAL: a kernel older than 5.14 knows no such advice; its first step is slow, not wrong.
        if error not in (0, errno.EINVAL):
            raise OSError(error, f"populating {size} bytes of shared memory: {os.strerror(error)}")
