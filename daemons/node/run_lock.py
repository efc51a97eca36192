"""Holds a run's claims on a machine: its directory, the locks on it, and the memory with its id.

**Home.** A run directory records in ``.home`` its path at the last start, and the file that its
``run.json`` was: ``{"path", "device", "inode"}``. In a copy, ``run.json`` is another file; while
the original is in its place, memory of the run belongs to the original. A moved directory finds no
original, and keeps the memory.

**Locks.** At most one training, and one supervisor for each node, run at a time. A lock is
``flock`` on a file that names its holder. The kernel releases the lock when the last process with
the descriptor has died. A node's children inherit its lock, so the next node waits until all of
them are dead. A signal may stop a newborn process before its program begins. If the parent dies
then, the newborn keeps the lock for ever, and the next holder kills the newborn. The files stay:
removing a file that another process is about to lock would give two processes "the" lock.

**Remains.** Segments of dead processes in shared memory are removed if they hold no model, or if
the run has ended with all its state saved.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from penstock.host.errors import ConfigError, LostMemberError, StateError
from penstock.host.files import (
    DAMAGED,
    holds_text,
    make_directory,
    open_lock,
    parse_json,
    write_atomically,
    writing,
)
from penstock.host.process_identity import is_stopped, start_ticks
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.local_names import remove_folder
from penstock.shm.base_users import sweep
from penstock.shm.inventory import NodeSegments, inventory
from penstock.shm.segment import unlink

_log = logging.getLogger(__name__)

POLL_S = 0.05
DEATH_WAIT_S = 20.0
"""Seconds for the children of a killed node to die: the kernel frees their memory first."""
STOPPED_WAIT_S = 1.0
"""Seconds between two searches for stopped processes that hold a dead holder's lock."""
_RECORD_BYTES = 64
"""Bytes of a lock's file: its holder's pid and start time, padded."""


class RunLock:
    """A held lock; a context manager, or call :meth:`release`."""

    def __init__(self, path: Path, descriptor: int, times_ns: tuple[int, int]) -> None:
        self.path = path
        self._descriptor = descriptor
        self._times_ns = times_ns  # of access and change, before the lock was taken

    @classmethod
    def acquire(
        cls, path: Path, *, wait_s: float, inheritable: bool = False, killed: bool = False
    ) -> RunLock:
        """Takes the lock; waits up to ``wait_s`` if only remains of a dead holder have it.
        ``killed``: waits for a living holder, too, which was killed and may still be ending.

        Raises:
            CapacityError: the disk has no room for the lock's file.
            ConfigError: it cannot be written for another reason, or a living process holds the
                lock; its pid is named.
            LostMemberError: processes of a dead holder are still there after ``wait_s``.
        """
        make_directory(path.parent)
        with writing(path, _RECORD_BYTES):
            descriptor = open_lock(path, os.O_RDWR | os.O_CREAT)
        deadline, looks_s = time.monotonic() + wait_s, time.monotonic() + STOPPED_WAIT_S
        status = os.fstat(descriptor)
        try:
            while not _try_lock(descriptor):
                holder = _holder(descriptor)
                if holder is not None and not (killed and time.monotonic() < deadline):
                    raise ConfigError(
                        f"{path.parent} is in use by process {holder}: stop that run first"
                        f" (penstock stop {path.parent}), or choose another run.dir"
                    )
                if time.monotonic() >= deadline:
                    raise LostMemberError(
                        f"{path}: processes of a killed run are still ending after {wait_s:g} s;"
                        " penstock doctor lists them"
                    )
                if time.monotonic() >= looks_s:
                    _kill_stopped_holders(descriptor)
                    looks_s = time.monotonic() + STOPPED_WAIT_S
                time.sleep(POLL_S)
            with writing(path, _RECORD_BYTES):
                _write_holder(descriptor, f"{os.getpid()} {start_ticks(os.getpid())}")
            os.set_inheritable(descriptor, inheritable)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, (status.st_atime_ns, status.st_mtime_ns))

    @property
    def descriptor(self) -> int:
        """The lock's descriptor, for a child that is to hold the lock too."""
        return self._descriptor

    def release(self) -> None:
        """Releases the lock; children that inherited it keep it until they end."""
        # The recorded holder is for people only: the kernel knows whether the lock is free.
        with suppress(OSError):
            _write_holder(self._descriptor, "")
            os.utime(self._descriptor, ns=self._times_ns)  # a lock that was held is no change
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
    """Returns the lock that ``penstock train`` holds."""
    return run_dir / ".lock"


def node_lock_path(run_dir: Path, node: str) -> Path:
    """Returns the lock that the supervisor of a node and its children hold."""
    return run_dir / f".lock-{node}"


def wait_until_dead(run_dir: Path, node: str) -> None:
    """Waits until a killed node and all its children are dead. The children hold the node's lock,
    and use its memory, until then.

    Raises:
        ConfigError: the node is still alive after :data:`DEATH_WAIT_S`.
        LostMemberError: its children are still alive after :data:`DEATH_WAIT_S`.
    """
    path = node_lock_path(run_dir, node)
    RunLock.acquire(path, wait_s=DEATH_WAIT_S, killed=True).release()


def prepare_lock_path(run_dir: Path) -> Path:
    """Returns the lock of the preparing process, and of the process that makes the inputs."""
    return run_dir / ".lock-prepare"


def _write_holder(descriptor: int, text: str) -> None:
    """Writes the holder in place, always in the same number of bytes: so an existing lock can
    change hands on a full disk.
    """
    os.pwrite(descriptor, text.ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> int | None:
    """Returns the pid of the living process that the file names, if any."""
    words = os.pread(descriptor, 64, 0).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        # Just taken and not written yet, or released by a node with a living child.
        return None
    pid, ticks = int(words[0]), int(words[1])
    return pid if start_ticks(pid) == ticks else None


def _kill_stopped_holders(descriptor: int) -> None:
    """Kills processes that hold the lock of a dead process and that a signal has stopped."""
    status = os.fstat(descriptor)
    for name in filter(str.isdecimal, os.listdir("/proc")):
        pid = int(name)
        if not is_stopped(pid) or not _holds(pid, status):
            continue
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                if _holds(pid, status):  # the pid is the same process's still
                    _log.warning("process %d of a killed run is stopped: killing it", pid)
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)


def _holds(pid: int, status: os.stat_result) -> bool:
    """Returns whether a process has a file open through the description that is locked. A process
    that waits for the lock has a description of its own.
    """
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), status):
                    text = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                    if any(line.startswith("lock:") for line in text.splitlines()):
                        return True
    except OSError:
        return False  # the process is gone, or another user's
    return False


def held_version(run_id: str) -> int | None:
    """Steps that the models in a run's memory on this machine contain; None when it holds none."""
    versions = [entry.committed for entry in inventory() if entry.run_id == run_id]
    return max((version for version in versions if version is not None), default=None)


def remove_empty_memory(run_id: str, node_name: str) -> bool:
    """Removes a dead node's sockets, and its segments if they never held a model. Returns whether
    there were such segments.

    The supervisor calls it after its children are dead; a memoryd that ends normally does the same
    itself.
    """
    return _remove(run_id, node_name, lambda entry: entry.committed is None and not entry.objection)


def remove_memory(run_id: str, node_name: str) -> bool:
    """Removes a dead node's sockets and segments with any content, when the run has ended and all
    is saved. Returns whether there were segments.
    """
    return _remove(run_id, node_name, lambda entry: True)


def _remove(run_id: str, node_name: str, worthless: Callable[[NodeSegments], bool]) -> bool:
    removed = False
    remove_folder(run_id, node_name)
    for entry in inventory():
        ours = (entry.run_id, entry.keeper) == (run_id, node_name)
        if ours and not entry.in_use and worthless(entry):
            removed = True
            for name in entry.names:
                unlink(name)
    sweep()
    return removed


def kept_words(directory: RunDirectory, saved: int) -> str:
    """Returns a note about the run's memory on this machine, with the commands that continue the
    run or free the memory. Empty if there is no memory. ``saved``: the newest saved step.
    """
    if not any(entry.run_id == directory.run_id for entry in inventory()):
        return ""
    step = held_version(directory.run_id)
    unsaved = step is not None and step > saved
    steps = f"step {step}" if step == saved + 1 else f"steps {saved + 1} to {step}"
    holds = f"{steps}, not saved" if unsaved else "the state, all of which is saved"
    force = " --force" if unsaved else ""
    return (
        f"this machine's shared memory keeps {holds}: after the cause is fixed, the same command"
        f" resumes from there; penstock doctor --clean{force} {directory.path} frees the"
        " memory"
    )


HOME = ".home"


def check_home(directory: RunDirectory) -> None:
    """Refuses a copy of a run that is active elsewhere, or has memory that belongs elsewhere.

    Raises:
        StateError: names the original and the remedy; or ``run.json`` is damaged.
    """
    original = original_of(directory.path)
    held = [entry for entry in inventory() if entry.run_id == directory.run_id]
    if original is None or not held:
        return
    step = held_version(directory.run_id)
    memory = "memory" if step is None else f"step {step} in memory"
    if any(entry.in_use for entry in held):
        remedy = f"stop it first (penstock stop {original})"
    else:
        remedy = (
            f"resume it there and let it save (penstock train {original}/resolved.yaml), or discard"
            f" it (penstock doctor --clean --force {original})"
        )
    raise StateError(
        f"{directory.path}: is a copy of {original}, and run {directory.run_id} has {memory}, which"
        f" belongs to the original: {remedy}; then this copy resumes from its own saved state"
    )


def check_nodes(directory: RunDirectory, nodes: Collection[str], saved: int) -> bool:
    """Removes this run's memory of nodes that are no longer in ``nodes``, because they were renamed
    or removed. Returns whether there was any. ``saved``: the newest saved step.

    Raises:
        ConfigError: such memory holds unsaved steps, and no node would continue from it.
    """
    dead = [e for e in inventory() if e.run_id == directory.run_id and not e.in_use]
    left = [entry for entry in dead if entry.keeper not in nodes]
    for entry in left:
        if entry.committed is not None and entry.committed > saved:
            raise ConfigError(
                f"cluster.nodes: names no node {entry.keeper}, but its memory on this machine holds"
                f" step {entry.committed}, and only step {saved} is saved. Add the node again, or"
                f" remove its memory (penstock doctor --clean --force {directory.path})"
                " to resume from the saved step"
            )
    return any([remove_memory(entry.run_id, entry.keeper) for entry in left])


def settle_home(directory: RunDirectory) -> None:
    """Records this directory as the run's place."""
    path = directory.path.absolute()
    text = json.dumps({"path": str(path), **_identity(path)})
    if not holds_text(path / HOME, text):
        write_atomically(path / HOME, text)


def former_home(path: Path) -> Path | None:
    """Returns the run's directory at its last start, if it was another one."""
    try:
        home = Path(parse_json((path / HOME).read_bytes())["path"])
    except (OSError, *DAMAGED):
        return None
    return None if home == path.absolute() else home


def original_of(path: Path) -> Path | None:
    """Returns the directory that this one is a copy of, if the original still exists."""
    try:
        fields = parse_json((path / HOME).read_bytes())
        home, identity = Path(fields["path"]), {k: fields[k] for k in ("device", "inode")}
        if identity == _identity(path) or home == path.absolute():
            return None
        return home if identity == _identity(home) else None
    except (OSError, *DAMAGED):
        return None  # no such file, not of our making, or the other directory is gone


def _identity(path: Path) -> dict[str, int]:
    status = os.stat(path / "run.json")
    return {"device": status.st_dev, "inode": status.st_ino}
