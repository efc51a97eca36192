"""Huge pages behind shared memory: what /dev/shm allows, and how much of a mapping has them.

A tmpfs decides by its mount option ``huge=`` (never, when it has none); ``deny`` and ``force`` in
``shmem_enabled`` overrule all mounts.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path

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
    """What holds for files of the tmpfs ``mount``."""
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
    """Path of a mapped file -> bytes of it that are huge pages in this process's page tables."""
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
    """Of the mount on top, which is listed last."""
    found: dict[str, str] = {}
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, where, _, options, *_ = line.split()
        if where == str(mount):
            found = dict(option.partition("=")[::2] for option in options.split(","))
    return found
