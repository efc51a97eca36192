"""Stamps of files: equal stamps mean equal content.

Preparation and bases compare stamps in place of contents, which may have terabytes.

A stamp has inode, size, and the times of the last changes. A program can set the time of the last
write back (``os.utime``). The kernel alone sets the time of the inode (ctime). Two kinds of files
have a digest of their content in place of inode and times:

* Files on a tmpfs: a write through a mapping changes no time there.
* Files that changed within 60 s. Elsewhere a write through a mapping changes the times once. Later
  writes change no time until the kernel has written the page to the disk, after about 30 s.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.host import world
from penstock.host.limits.cgroup import usable_cpus

SETTLED_S = 60.0
"""Seconds after the last change of a file from which its times identify its content."""

_IN_MEMORY = frozenset((0x01021994, 0x858458F6, 0x958458F6))
"""Types of file systems by statfs(2): tmpfs, ramfs, hugetlbfs."""
_CHUNK_BYTES = 16 << 20
_STATFS_BYTES = 256

Stamp = list[int | str]


def stamps_of(paths: Sequence[Path], as_of_s: float | None = None) -> list[Stamp]:
    """Returns a stamp of each file. ``as_of_s``: the wall-clock time to count 60 s back from; None:
    now. Stamps of one time can be compared, however long the caller works between two calls.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    now_s = world.wall() if as_of_s is None else as_of_s
    stamps: list[Stamp] = []
    for path in paths:
        status = os.stat(path)
        if now_s - status.st_ctime < SETTLED_S or _is_in_memory(path):
            stamps.append([status.st_size, content_digest(path)])
        else:
            times = (status.st_mtime_ns, status.st_ctime_ns)
            stamps.append([status.st_size, status.st_ino, *times])
    return stamps


def content_digest(path: Path) -> str:
    """Returns a digest of a file's content.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return digest_of(file.fileno(), os.fstat(file.fileno()).st_size).hex()


def digest_of(descriptor: int, num_bytes: int) -> bytes:
    """Returns a digest of the first bytes of an open file: SHA-256 of the SHA-256 of each 16 MiB.
    All usable CPUs read.

    Raises:
        OSError: the file cannot be read.
    """

    def digest(start: int) -> bytes:
        content = os.pread(descriptor, min(_CHUNK_BYTES, num_bytes - start), start)
        return hashlib.sha256(content).digest()

    with ThreadPoolExecutor(usable_cpus()) as pool:
        digests = list(pool.map(digest, range(0, num_bytes, _CHUNK_BYTES)))
    return hashlib.sha256(b"".join(digests)).digest()


def _is_in_memory(path: Path) -> bool:
    """Returns whether the file system of a file keeps no times of writes through mappings."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc.statfs(os.fsencode(path), result) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    kind = ctypes.c_long.from_buffer(result).value
    return kind & 0xFFFFFFFF in _IN_MEMORY
