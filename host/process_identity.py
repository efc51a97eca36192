"""Identities of processes that survive the reuse of process ids: pid, start time, boot."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """``start_ticks`` is field 22 of /proc/PID/stat (clock ticks since boot).

    ``boot`` is the kernel's boot id.
    """

    pid: int
    start_ticks: int
    boot: uuid.UUID

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Returns the calling process."""
        identity = cls.of(os.getpid())
        assert identity is not None, "the calling process must be listed in /proc"
        return identity

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Returns the living process with this id, or None (zombies count as dead)."""
        ticks = start_ticks(pid)
        return None if ticks is None else cls(pid=pid, start_ticks=ticks, boot=boot_id())

    def alive(self) -> bool:
        """Returns whether exactly this process still runs (zombies count as dead)."""
        return self.boot == boot_id() and start_ticks(self.pid) == self.start_ticks


def boot_id() -> uuid.UUID:
    """Returns the identity of the running kernel instance."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def start_ticks(pid: int) -> int | None:
    """Returns the start time of a living process; None for a zombie or a process that ended."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Returns whether the process was stopped by a signal (SIGSTOP), and not continued.

    A process that a debugger holds does not count.
    """
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def group_of(leader: int) -> list[int]:
    """Returns the processes of a process group, including dead ones that are not reaped."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if (fields := _stat(pid)) is not None and int(fields[2]) == leader]


def parent_of(pid: int) -> int:
    """Returns the pid of a process's parent; 0 for a process that ended, and for the first
    process.
    """
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def descends_from(pid: int, elder: int) -> bool:
    """Returns whether a process is ``elder``, or descends from it through living ancestors."""
    while pid not in (0, elder):
        pid = parent_of(pid)
    return pid == elder


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """CPU time of all threads of a living process, its own memory without mappings of /dev/shm, and
    its start in seconds since 1970.
    """

    cpu_s: float
    resident_bytes: int
    started_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessUsage | None:
        """Returns the usage of a process; None if it ended."""
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX":
            return None
        try:
            memory = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        kib = {name: int(size) for name, size in _RESIDENT.findall(memory)}
        ticks = os.sysconf("SC_CLK_TCK")
        return cls(
            cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
            resident_bytes=1024 * (kib.get("RssAnon", 0) + kib.get("RssFile", 0)),
            started_s=_boot_s() + int(fields[19]) / ticks,
        )


_RESIDENT = re.compile(r"^(RssAnon|RssFile):\s+(\d+) kB$", re.MULTILINE)


@cache
def _boot_s() -> float:
    """Returns the start of the machine, in seconds since 1970."""
    match = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    return float(match[1]) if match else 0.0


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on; None if the process ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and parentheses: fields are counted after the last ')'.
    return text.rpartition(")")[2].split()
