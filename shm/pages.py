"""The pages behind shared memory: their NUMA nodes, and their sizes (huge or not).

The C library does not wrap the Linux system calls that set and read the NUMA node. The policy of a
shared mapping belongs to the memory, not to the process. A policy that is set before the pages
exist holds for every process that touches them. Nodes are preferred, never enforced: a full node
moves pages to another node, and training becomes slower.

The mount option ``huge=`` of a tmpfs (default: never) decides whether its pages are huge; ``deny``
and ``force`` in ``shmem_enabled`` overrule all mounts.
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
    """Asks the kernel to place pages that do not exist yet on these nodes. Offsets are
    page-aligned.

    Raises:
        OSError: the kernel refuses (no such node for this process, or a container forbids the
            call). Some ranges may have been set.
    """
    with _address(buffer) as base:
        for place in ranges:
            mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
            mask[place.node // 64] = 1 << place.node % 64
            # The kernel reads one bit less than the given number.
            _call(
                "mbind",
                ctypes.c_void_p(base + place.offset),
                ctypes.c_ulong(place.num_bytes),
                ctypes.c_int(_MPOL_PREFERRED),
                mask,
                ctypes.c_ulong(_MASK_BITS + 1),
                ctypes.c_uint(0),
            )


def prefer_nodes_if_granted(buffer: memoryview | mmap.mmap, ranges: Sequence[NodeRange]) -> None:
    """Calls :func:`prefer_nodes`, and only logs a refusal."""
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
    """Yields the address of the buffer. The export is released at the end, even if the traceback of
    an exception keeps frames alive.
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
    """Returns the setting for huge pages of files in the tmpfs ``mount``."""
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
    counts: Counter[str] = Counter()
    path = ""
    for line in smaps.read_text(encoding="utf-8", errors="replace").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):  # the next mapping: range, flags, offset, device, inode, path
            path = rest[4] if len(rest) > 4 else ""
        elif first == "ShmemPmdMapped:" and path:
            counts[path] += int(rest[0]) * 1024
    return +counts


def _mount_options(mount: Path, mounts: Path) -> dict[str, str]:
    """Returns the options of the mount on top, which is listed last."""
    values: dict[str, str] = {}
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, where, _, options, *_ = line.split()
        if where == str(mount):
            values = dict(option.partition("=")[::2] for option in options.split(","))
    return values
