"""Who a process is, beyond reuse of process ids: pid, start time, boot."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
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
    """Identity of the running kernel instance."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def start_ticks(pid: int) -> int | None:
    """Start time of a living process, None for one that is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Returns whether the process was stopped by a signal (SIGSTOP), and not continued.

    A process that a debugger holds is not meant: somebody looks at it.
    """
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on, None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may hold spaces and parentheses: fields are counted after the last ')'.
    return text.rpartition(")")[2].split()
