"""The pages behind shared memory: on which NUMA node they lie, and which of them are huge.

Setting and asking for the NUMA node are Linux system calls that the C library does not wrap. The
policy of a shared mapping belongs to the memory, not to the process: set before the pages exist, it
holds for whoever makes them. Nodes are preferred, never enforced: a full node makes pages go
elsewhere, and training slower.

Whether pages are huge a tmpfs decides by its mount option ``huge=`` (never, when it has none);
``deny`` and ``force`` in ``shmem_enabled`` overrule all mounts.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.shm.layout import PAGE_BYTES

_MPOL_PREFERRED = 1
_MASK_BITS = 1024  # the kernel's largest number of nodes
_CALLS = {"x86_64": {"mbind": 237, "move_pages": 279}, "aarch64": {"mbind": 235, "move_pages": 239}}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """Bytes ``[offset, offset + num_bytes)`` of a segment belong on NUMA node ``node``."""

    offset: int
    num_bytes: int
    node: int


def prefer_nodes(buffer: memoryview | mmap.mmap, ranges: Iterable[NodeRange]) -> None:
    """Ask that pages which do not exist yet be made on these nodes. Offsets are page-aligned.

    Raises:
        OSError: the kernel refuses (no such node for this process, a container that forbids it).
            Some ranges may have been set.
    """
    with _address(buffer) as base:
        for wanted in ranges:
            mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
            mask[wanted.node // 64] = 1 << wanted.node % 64
            # The kernel reads one bit less than it is told.
            _call(
                "mbind",
                ctypes.c_void_p(base + wanted.offset),
                ctypes.c_ulong(wanted.num_bytes),
                ctypes.c_int(_MPOL_PREFERRED),
                mask,
                ctypes.c_ulong(_MASK_BITS + 1),
                ctypes.c_uint(0),
            )


def prefer_nodes_if_granted(buffer: memoryview | mmap.mmap, ranges: Sequence[NodeRange]) -> None:
    """As :func:`prefer_nodes`; a refusal is only logged."""
    try:
        prefer_nodes(buffer, ranges)
    except OSError as error:
        _log.warning("pages lie on NUMA nodes as they come: %s", error)


def nodes_of_pages(buffer: memoryview | mmap.mmap, offsets: Sequence[int]) -> list[int | None]:
    """Returns the NUMA nodes of the pages at byte ``offsets``; None for a page that is not mapped.

    Raises:
        OSError: the kernel does not say (a container that forbids it).
    """
    status = (ctypes.c_int * len(offsets))()
    with _address(buffer) as base:
        pages = [(base + offset) // PAGE_BYTES * PAGE_BYTES for offset in offsets]
        _call(
            "move_pages",
            ctypes.c_int(0),
            ctypes.c_ulong(len(pages)),
            (ctypes.c_void_p * len(pages))(*pages),
            None,
            status,
            ctypes.c_int(0),
        )
    return [node if node >= 0 else None for node in status]


@contextmanager
def _address(buffer: memoryview | mmap.mmap) -> Iterator[int]:
    """Yields the address of the buffer. What keeps it from being closed goes at the end, even if an
    exception, whose traceback keeps frames alive, lives on.
    """
    anchor = ctypes.c_char.from_buffer(buffer)
    try:
        yield ctypes.addressof(anchor)
    finally:
        del anchor


def _call(name: str, *arguments: object) -> None:
    number = _CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(f"{name}: its number on {platform.machine()} is not known here")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MOUNTS = Path("/proc/mounts")


class HugePages(StrEnum):
    """When a page of the mount is huge. ``ADVISE``: only when made through an advised mapping, so
    not by posix_fallocate.
    """

    NEVER = "never"
    ADVISE = "advise"
    WITHIN_SIZE = "within_size"
    ALWAYS = "always"


def allowed_huge_pages(
    mount: Path, *, mounts: Path = MOUNTS, shmem_enabled: Path = SHMEM_ENABLED
) -> HugePages:
    """Returns what holds for files of the tmpfs ``mount``."""
    try:
        overruling = shmem_enabled.read_text(encoding="ascii")
    except FileNotFoundError:
        return HugePages.NEVER  # a kernel without them
    if "[deny]" in overruling:
        return HugePages.NEVER
    if "[force]" in overruling:
        return HugePages.ALWAYS
    return HugePages(_mount_options(mount, mounts).get("huge", "never"))


def huge_bytes(smaps: Path = Path("/proc/self/smaps")) -> Counter[str]:
    """Returns, by the path of each mapped file, its bytes in huge pages of this process."""
    found: Counter[str] = Counter()
    path = ""
    for line in smaps.read_text(encoding="utf-8", errors="replace").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):  # the next mapping: range, flags, offset, device, inode, path
            path = rest[4] if len(rest) > 4 else ""
        elif first == "ShmemPmdMapped:" and path:
            found[path] += int(rest[0]) * 1024
    return +found


def _mount_options(mount: Path, mounts: Path) -> dict[str, str]:
    """Returns the options of the mount on top, which is listed last."""
    found: dict[str, str] = {}
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, where, _, options, *_ = line.split()
        if where == str(mount):
            found = dict(option.partition("=")[::2] for option in options.split(","))
    return found
