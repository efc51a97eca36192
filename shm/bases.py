"""Files of frozen weights that runs share: one file a block, ``/penstock-base-UID-DIGEST``.

The digest stands for names, shapes, type and content of a block's frozen array
(:mod:`penstock.protocol.run.bases.base_identity`). So all runs of a user with the same weights
use one file. Layout::

    array, from offset 0, zeros up to a page | page: magic, format, array bytes, digest, filler,
                                               checksum of the array

A file is filled as ``NAME.filling`` (mode 0600, exclusive ``flock`` of its filler). The file
appears under this name with its lock, so a file without a lock is of a dead filler. A complete file
gets mode 0400 and is renamed, without replacing another one; then the filler's lock becomes a
shared one. Each memoryd that uses a base holds a shared lock, and the control segment of its run
names the base (:mod:`penstock.shm.base_users` removes bases without users). A user's steps:

1. Name the base in the control segment.
2. Open the file, take the lock, compare the name's inode with that of the open file. A file that
   was removed in between is none: begin again.
3. Compare the array with its checksum, if the memory is new.

Any user of the machine may create a file under such a name first. A memoryd then draws a random
digest for the block, and its control segment leads to the file. A file of the same user with
another mode, size or content is removed and made again, unless a run uses the file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock.host.stamps import digest_of
from penstock.host.trust import UntrustedError, kind_of, open_own
from penstock.shm.layout import PAGE_BYTES, ArrayRange
from penstock.shm.segment import (
    OUT_OF_SPACE,
    SHM_ROOT,
    SegmentError,
    SegmentMissingError,
    ShortSegmentError,
    StrangeSegmentError,
    is_own,
    list_segments,
    no_space,
    open_segment,
    path_of,
    populate_read,
    reserve_and_map,
    room,
    status_of,
)

DIGEST_BYTES = 32
FILLING = ".filling"
"""End of the name of a file that is not complete."""
_STALLED = ".stalled"
"""End of the name of a file that a process fills without progress."""
_PREFIX = "/penstock-base-"
_NAME = re.compile(
    rf"{_PREFIX}(?P<uid>[0-9]{{1,10}})-(?P<digest>[0-9a-f]{{64}})(?P<filling>{re.escape(FILLING)}|{re.escape(_STALLED)})?",
    re.ASCII,
)
DIGEST_IN_NAME = re.compile("[0-9a-f]{64}", re.ASCII)
_MAGIC = int.from_bytes(b"PNSTBASE", "little")
_FORMAT = 2
_UNSUMMED = 1
"""Format of an older Penstock, without checksums."""
_FILLER_BYTES = 64
_TRAILER = struct.Struct(f"<QQQ{DIGEST_BYTES}s{_FILLER_BYTES}s{DIGEST_BYTES}s")
_IDENTITY_BYTES = _TRAILER.size - _FILLER_BYTES - DIGEST_BYTES
_NO_SUM = bytes(DIGEST_BYTES)
_COMPLETE_MODE = 0o400
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class BusyBaseError(SegmentError):
    """The base is about to appear or to be removed: a process holds its lock for a moment."""


class DamagedBaseError(SegmentError):
    """The array of the base differs from its checksum."""


UNUSABLE = (StrangeSegmentError, ShortSegmentError, DamagedBaseError)
"""Errors of a name that does not lead to the base."""


class UnfilledBaseError(SegmentError):
    """The memory's bases are not complete yet: memoryd is about to fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseName:
    """A name of a base in /dev/shm. ``uid``: the owner of the file. ``filling``: incomplete."""

    name: str
    digest: str
    uid: int
    num_bytes: int
    filling: bool


def base_name(digest: bytes) -> str:
    """Returns the name of a complete base of this user."""
    return f"{_PREFIX}{os.geteuid()}-{digest.hex()}"


def parse_name(name: str, status: os.stat_result) -> BaseName | None:
    """Returns the base with a name in /dev/shm; None if the name is not of a base, or the file is
    not of the user in its name.
    """
    match = _NAME.fullmatch(name)
    if match is None or kind_of(status) != "file" or int(match["uid"]) != status.st_uid:
        return None
    return BaseName(
        name=name,
        digest=match["digest"],
        uid=status.st_uid,
        num_bytes=status.st_size,
        filling=match["filling"] is not None,
    )


def own_bases() -> list[BaseName]:
    """Returns all base files of this user, complete or not, in order of their names."""
    entries = []
    for name in list_segments(f"{_PREFIX}{os.geteuid()}-"):
        status = status_of(name)
        entry = None if status is None else parse_name(name, status)
        if entry is not None and entry.uid == os.geteuid():
            entries.append(entry)
    return entries


def file_bytes(num_bytes: int) -> int:
    """Returns the bytes of the file with an array of ``num_bytes``."""
    return _padded(num_bytes) + PAGE_BYTES


class Base:
    """A base file that this process has open and locked: shared if complete, else exclusively."""

    def __init__(self, digest: bytes, num_bytes: int, descriptor: int, *, complete: bool) -> None:
        self.digest = digest
        self.num_bytes = num_bytes
        self.descriptor = descriptor
        self.complete = complete
        self._is_summed = complete

    @classmethod
    def adopt(cls, digest: bytes, num_bytes: int, *, compares: bool = False) -> Base | None:
        """Returns the complete base with a shared lock; None if there is none. ``compares``: reads
        the array and compares it with its checksum.

        Raises:
            BusyBaseError: try again in a moment.
            SegmentError: the name leads to something else, which is not used.
        """
        try:
            descriptor = open_base(digest, num_bytes)
        except SegmentMissingError:
            return None
        try:
            if not _lock(descriptor, fcntl.LOCK_SH):
                raise BusyBaseError(f"base {base_name(digest)} is locked")
            if not _leads_to(base_name(digest), descriptor):
                os.close(descriptor)  # removed before the lock was taken
                return None
            if compares:
                _compare(base_name(digest), descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(digest, num_bytes, descriptor, complete=True)

    @classmethod
    def claim(cls, digest: bytes, num_bytes: int, filler: str) -> Base | None:
        """Creates a file to be filled, with all its room; None if the base exists by now, or a
        process fills it. ``filler``: run and node, for the processes that write the array.

        Raises:
            NoSpaceError: there is no room; nothing stays.
            SegmentError: the name leads to something else.
        """
        place = base_name(digest) + FILLING
        descriptor = os.open(SHM_ROOT, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # The lock before the name: the name of a living filler is always locked.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                _link(descriptor, place)
            except FileExistsError:
                remove_dead(place)
                os.close(descriptor)
                return None
            base = cls(digest, num_bytes, descriptor, complete=False)
        except BaseException:
            os.close(descriptor)
            raise
        try:
            if (
                status_of(base_name(digest)) is not None
            ):  # completed since the caller tried to adopt it
                base.close()
                return None
            base._reserve(filler)
        except BaseException:
            base.close()
            raise
        return base

    @property
    def name(self) -> str:
        """Returns the name that the file has now."""
        return base_name(self.digest) + ("" if self.complete else FILLING)

    @property
    def has_name(self) -> bool:
        """True unless the name of the file was removed or given to another file."""
        return _leads_to(base_name(self.digest), self.descriptor) or bool(self._filling_name())

    def beat(self) -> None:
        """Shows other runs, which wait for this base, that its filler works."""
        os.utime(self.descriptor)

    def seal(self) -> bool:
        """Makes the filled file the base. Returns False if another process has made the base in
        the meantime: this file is to be closed then.
        """
        if not self._is_summed:
            self.beat()
            self._write_trailer(digest_of(self.descriptor, self.num_bytes))
            os.fchmod(self.descriptor, _COMPLETE_MODE)
            self._is_summed = True
        place = self._filling_name()
        if place is None or not _rename(place, base_name(self.digest)):
            return False
        self.complete = True
        # Not atomic. A process that gets the lock in between finds that a control segment names
        # the base, and leaves the base alone.
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        return True

    def change_digest(self, digest: bytes) -> None:
        """Gives the filled file the digest of another base, before it gets its name."""
        status = os.pread(self.descriptor, _TRAILER.size, _padded(self.num_bytes))
        place = self._filling_name()
        if place is None or not _rename(place, base_name(digest) + FILLING):
            raise StrangeSegmentError(f"{path_of(self.name)} was replaced")
        self.digest = digest
        self._write_trailer(status[-DIGEST_BYTES:])

    def close(self) -> None:
        """Gives the lock back; an incomplete file is removed."""
        if self.descriptor < 0:
            return
        place = None if self.complete else self._filling_name()
        descriptor, self.descriptor = self.descriptor, -1
        if place is not None:
            with suppress(FileNotFoundError):
                os.unlink(path_of(place))
        # Not left to the close: the lock would last as long as a mapping of the file.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def _filling_name(self) -> str | None:
        names = (base_name(self.digest) + end for end in (FILLING, _STALLED))
        return next((name for name in names if _leads_to(name, self.descriptor)), None)

    def _write_trailer(self, checksum: bytes) -> None:
        trailer = _trailer(self.digest, self.num_bytes, "", checksum)
        os.pwrite(self.descriptor, trailer, _padded(self.num_bytes))

    def _reserve(self, filler: str) -> None:
        size = file_bytes(self.num_bytes)
        available = room()
        if size > available.available:
            raise no_space(self.name, size, available)
        trailer = _trailer(self.digest, self.num_bytes, filler)
        try:
            reserve_and_map(self.descriptor, _padded(self.num_bytes), (), PAGE_BYTES).close()
            os.pwrite(self.descriptor, trailer, _padded(self.num_bytes))
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise no_space(self.name, size, room()) from error
            raise


def open_base(digest: bytes, num_bytes: int) -> int:
    """Opens a complete base for reading, and returns its descriptor.

    Raises:
        SegmentMissingError: there is none.
        SegmentError: the file is of another user, mode or size, or of another base.
    """
    name = base_name(digest)
    descriptor = open_segment(name, os.O_RDONLY)
    try:
        _check(name, descriptor, digest, num_bytes, _COMPLETE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_filling(digest: bytes, num_bytes: int, filler: str) -> int:
    """Opens a file that the memoryd of ``filler`` has claimed, to write the array.

    Raises:
        SegmentError: there is none, or another memoryd has claimed it.
    """
    name = base_name(digest) + FILLING
    descriptor = open_segment(name, os.O_RDWR)
    try:
        _check(name, descriptor, digest, num_bytes, 0o600)
        place = _padded(num_bytes)
        if os.pread(descriptor, _TRAILER.size, place) != _trailer(digest, num_bytes, filler):
            raise StrangeSegmentError(f"{path_of(name)} is filled by another run")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def being_filled(digest: bytes) -> float | None:
    """Returns the time (of the file) at which the filler of a base last worked; None if no file
    is being filled.
    """
    status = status_of(base_name(digest) + FILLING)
    return None if status is None else status.st_mtime


def remove_dead(name: str) -> bool:
    """Removes a file of a dead filler; returns whether it did.

    Raises:
        StrangeSegmentError: the name leads to something else.
    """
    try:
        descriptor = open_own(path_of(name), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except UntrustedError as error:
        raise StrangeSegmentError(str(error)) from error
    try:
        dead = _lock(descriptor, fcntl.LOCK_EX) and _leads_to(name, descriptor)
        if dead:
            os.unlink(path_of(name))
        return dead
    finally:
        os.close(descriptor)


def take_claim(digest: bytes) -> None:
    """Renames a file that a process fills without progress, so that another process can claim the
    base. The first to finish completes the base.

    Raises:
        StrangeSegmentError: the other name is taken.
    """
    names = (base_name(digest) + end for end in (FILLING, _STALLED))
    try:
        os.rename(*map(path_of, names))
    except FileNotFoundError:
        return
    except OSError as error:
        path = path_of(base_name(digest) + _STALLED)
        raise StrangeSegmentError(f"{path} is taken: {error.strerror}") from error


def lock_alone(name: str) -> int | None:
    """Returns a descriptor of a file of this user with an exclusive lock, to remove the file; None
    if the file is gone, of another user or in use. Mode and content do not matter.
    """
    path, flags = path_of(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if not is_own(status_of(name)):
        return None
    try:
        descriptor = os.open(path, flags)
    except PermissionError:
        with suppress(OSError):
            path.chmod(_COMPLETE_MODE, follow_symlinks=False)
        try:
            descriptor = os.open(path, flags)
        except OSError:
            return None
    except OSError:
        return None
    locked = is_own(os.fstat(descriptor)) and _lock(descriptor, fcntl.LOCK_EX)
    if locked and _leads_to(name, descriptor):
        return descriptor
    os.close(descriptor)
    return None


class BaseMapping:
    """The frozen arrays of a node as one range of addresses, as in a segment of their own. The
    array of each block is at its place in the layout. Places without a base are private zero bytes.

    A write into a complete base ends the process with SIGSEGV.
    """

    def __init__(self, size: int, places: Mapping[int, ArrayRange], *, writable: bool) -> None:
        """Reserves the addresses. ``places``: block -> range. ``writable``: what views claim;
        torch does not take others without a warning.
        """
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.size = size
        self._places = places
        self._prot = prot
        self._mapping: mmap.mmap | None = mmap.mmap(-1, size, flags=flags, prot=prot)
        self.buffer = memoryview(self._mapping)
        self._read_only: set[int] = set()
        self._address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data

    def show(self, block: int, descriptor: int, *, writable: bool = False) -> None:
        """Maps a base file at the block's place, and fills this process's page tables."""
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._put(block, prot, mmap.MAP_SHARED, descriptor)
        (self._read_only.discard if writable else self._read_only.add)(block)
        place = self._places[block]
        populate_read(self._address + place.offset, _padded(place.num_bytes))

    def hide(self, block: int) -> None:
        """Puts private zero bytes at the block's place."""
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        self._put(block, prot, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._read_only.discard(block)

    def is_read_only(self, block: int) -> bool:
        """Returns whether a complete base is mapped at the block's place."""
        return block in self._read_only

    def close(self) -> None:
        """Unmaps everything. Live views keep the mapping until the last view is freed."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        with suppress(BufferError):
            self.buffer.release()
            mapping.close()

    def _put(self, block: int, prot: int, flags: int, descriptor: int) -> None:
        place = self._places[block]
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
        )
        address, size = self._address + place.offset, _padded(place.num_bytes)
        if libc.mmap(address, size, prot, flags | _MAP_FIXED, descriptor, 0) == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mapping {size} bytes of a base: {os.strerror(code)}")


REMEDY = (
    "remove it (its user or root may), or train with memory.share_base: never, which takes"
    " memory of the run's own"
)


def _check(name: str, descriptor: int, digest: bytes, num_bytes: int, mode: int) -> None:
    status = os.fstat(descriptor)
    if status.st_mode & 0o777 != mode:
        raise StrangeSegmentError(
            f"{path_of(name)} has mode {status.st_mode & 0o777:04o}, expected {mode:04o}"
        )
    expected = file_bytes(num_bytes)
    if status.st_size != expected or status.st_blocks * 512 < expected:
        raise ShortSegmentError(
            f"{path_of(name)} has {status.st_size} bytes, of which {status.st_blocks * 512} are"
            f" reserved; {expected} are expected"
        )
    trailer = os.pread(descriptor, _TRAILER.size, _padded(num_bytes))
    known = [
        _trailer(digest, num_bytes, "", format_=number)[:_IDENTITY_BYTES]
        for number in (_FORMAT, _UNSUMMED)
    ]
    if trailer[:_IDENTITY_BYTES] not in known:
        raise StrangeSegmentError(f"{path_of(name)} is not the base of its name")


def _compare(name: str, descriptor: int, num_bytes: int) -> None:
    """Compares the array of a base with its checksum.

    Raises:
        DamagedBaseError: they differ, or the base has no checksum.
    """
    trailer = os.pread(descriptor, _TRAILER.size, _padded(num_bytes))
    if digest_of(descriptor, num_bytes) != trailer[-DIGEST_BYTES:]:
        raise DamagedBaseError(f"{path_of(name)} is damaged: its checksum differs")


def _trailer(
    digest: bytes,
    num_bytes: int,
    filler: str,
    checksum: bytes = _NO_SUM,
    *,
    format_: int = _FORMAT,
) -> bytes:
    known = filler.encode()[:_FILLER_BYTES]
    return _TRAILER.pack(_MAGIC, format_, num_bytes, digest, known, checksum)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leads_to(name: str, descriptor: int) -> bool:
    status = status_of(name)
    return status is not None and os.path.samestat(status, os.fstat(descriptor))


def _link(descriptor: int, name: str) -> None:
    # A descriptor, which whole paths ignore, makes Python follow the link to the file.
    source = f"/proc/self/fd/{descriptor}"
    os.link(source, path_of(name), src_dir_fd=descriptor, follow_symlinks=True)


def _rename(source: str, target: str) -> bool:
    """Renames a file unless another one has the name; returns whether it has the name now."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(path_of(source)), os.fsencode(path_of(target))
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, f"renaming {path_of(source)}: {os.strerror(code)}")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
