"""Locks on a run directory: one training, and one supervisor per node, at a time.

A lock is ``flock`` on a file that names its holder. The kernel releases it when the last process
that holds the descriptor is gone; a node's children inherit its lock, so while one of them is
still dying the next node waits, however the first one ended. The files stay: removing a file
that others may be about to lock would let two of them hold "the" lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from penstock.protocol.errors import ConfigError, LostMemberError
from penstock.protocol.files import make_directory, writing
from penstock.shm.process import start_ticks

POLL_S = 0.05
_RECORD_BYTES = 64
"""Of the file: its holder's pid and start time, padded."""


class RunLock:
    """A held lock; a context manager, or call :meth:`release`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, *, wait_s: float, inheritable: bool = False) -> RunLock:
        """Take the lock; wait up to ``wait_s`` when only the remains of a dead holder have it.

        Raises:
            CapacityError: the disk has no room for the lock's file.
            ConfigError: it cannot be written for another reason, or a living process holds the
                lock; its pid is named.
            LostMemberError: processes of a dead holder are still there after ``wait_s``.
        """
        make_directory(path.parent)
        with writing(path, _RECORD_BYTES):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        try:
            while not _try_lock(descriptor):
                holder = _holder(descriptor)
                if holder is not None:
                    raise ConfigError(
                        f"{path.parent} is in use by process {holder}: stop that run first"
                        f" (penstock stop --run-dir {path.parent}), or choose another run.dir"
                    )
                if time.monotonic() >= deadline:
                    raise LostMemberError(
                        f"{path}: processes of a killed run still end after {wait_s:g} s;"
                        " penstock doctor lists them"
                    )
                time.sleep(POLL_S)
            with writing(path, _RECORD_BYTES):
                _write_holder(descriptor, f"{os.getpid()} {start_ticks(os.getpid())}")
            os.set_inheritable(descriptor, inheritable)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    @property
    def descriptor(self) -> int:
        """For a child that is to hold the lock too."""
        return self._descriptor

    def release(self) -> None:
        """Give it up; children that inherited the lock keep it until they end."""
        # Whom the file names is for people: the kernel knows when the lock is free.
        with suppress(OSError):
            _write_holder(self._descriptor, "")
        os.close(self._descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def train_lock_path(run_dir: Path) -> Path:
    """The lock that ``penstock train`` holds."""
    return run_dir / ".lock"


def node_lock_path(run_dir: Path, node: str) -> Path:
    """The lock that the supervisor of a node and its children hold."""
    return run_dir / f".lock-{node}"


def prepare_lock_path(run_dir: Path) -> Path:
    """The lock of whoever prepares the run directory, and of the process that makes its inputs."""
    return run_dir / ".lock-prepare"


def _write_holder(descriptor: int, text: str) -> None:
    """Always as many bytes in place: on a full disk an existing lock can still change hands."""
    os.pwrite(descriptor, text.ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> int | None:
    """Pid of the living process that the file names, if any."""
    words = os.pread(descriptor, 64, 0).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return (
            None  # taken a moment ago and not written yet, or given up by a node whose child lives
        )
    pid, ticks = int(words[0]), int(words[1])
    return pid if start_ticks(pid) == ticks else None
