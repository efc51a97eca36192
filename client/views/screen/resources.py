"""Memory and disks that a run uses, for the bars of the screen."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config.values import human_bytes
from penstock.host.limits.cgroup import MACHINE, MemoryUnknownError, tightest_memory
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.inventory import held_bytes
from penstock.shm.segment import SHM_ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Used bytes of a resource. ``limit`` is its size in bytes, or None if unknown.

    ``ours`` are the bytes that this run uses, or None if unknown.
    """

    name: str
    used: float
    limit: float | None
    ours: float | None = None

    @property
    def words(self) -> str:
        """Returns the amount as a short text."""
        limit = "" if self.limit is None else f" of {short_bytes(self.limit)}"
        return f"{short_bytes(self.used)}{limit}"

    @property
    def share(self) -> float | None:
        """The used share, from 0 to 1, or None."""
        return None if not self.limit else min(1.0, self.used / self.limit)


def short_bytes(num_bytes: float) -> str:
    """Returns bytes with three digits at most, such as ``1.5 GiB`` and ``252 GiB``."""
    words = human_bytes(num_bytes)
    number, _, unit = words.partition(" ")
    return f"{float(number):.0f} {unit}" if len(number) > 4 else words


def devices(status: pb.StatusReply) -> list[Amount]:
    """Returns the measured peak memory of each device in the last attempt."""
    return [
        Amount(
            name=f"device {member.member.partition('.')[2]}",
            used=member.report.peak_device_bytes,
            limit=member.report.device_limit_bytes or None,
        )
        for member in status.members
        if member.report.peak_device_bytes
    ]


def fullest(amounts: list[Amount]) -> list[Amount]:
    """Returns the amounts with the fullest device in place of all devices."""
    of_devices = [amount for amount in amounts if amount.name.startswith("device ")]
    others = [amount for amount in amounts if amount not in of_devices]
    if not of_devices:
        return others
    most = max(of_devices, key=lambda amount: amount.share or 0.0)
    return [replace(most, name="devices max"), *others]


def machine(run_id: str, run_dir: Path | None) -> list[Amount]:
    """Returns this machine's shared memory, memory and disk; nothing for a run elsewhere
    (``run_dir`` None).
    """
    if run_dir is None:
        return []
    amounts = [_shared(run_id), _host(), _disk(run_dir)]
    return [amount for amount in amounts if amount is not None]


def _shared(run_id: str) -> Amount | None:
    sizes = _file_system(SHM_ROOT)
    if sizes is None:
        return None
    size, free = sizes
    return Amount(name="/dev/shm", used=size - free, limit=size, ours=held_bytes(run_id))


def _host() -> Amount | None:
    try:
        limit = tightest_memory()
    except (MemoryUnknownError, OSError):
        return None
    name = "memory" if limit.owner == MACHINE else "memory (cg)"
    return Amount(name=name, used=limit.limit - limit.available, limit=limit.limit)


def _disk(run_dir: Path) -> Amount | None:
    sizes = _file_system(run_dir)
    if sizes is None:
        return None
    size, free = sizes
    return Amount(name="run's disk", used=size - free, limit=size)


def _file_system(path: Path) -> tuple[int, int] | None:
    """Returns size and free bytes of the file system of ``path``."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
