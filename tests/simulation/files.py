"""Saved states and ``metrics.jsonl``: real files, and what full disks and power cuts do to them.

What a machine wrote and did not sync goes with its power: of each directory the last of its changes
of names, however many; of each file the last of its bytes, which may be zeros instead. What other
machines wrote stays, as they write it again to a file server that comes back.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import penstock.host.files as files_module
from penstock.daemons.memory.disk import DISK, Disk
from penstock.daemons.memory.snapshot import MANIFEST_NAME
from penstock.daemons.scheduler.saved import SavedStates
from penstock.host import world
from penstock.host.errors import StateError
from penstock.protocol.run.saved_base import BASE, base_file, base_paths
from tests.simulation.disk import Disk as JournalDisk
from tests.simulation.history import History
from tests.simulation.kernel import Kernel, Machine, Process

REMOVED = "removed"
"""The folder beside ``state`` with what was removed, until no power cut brings it back."""
ROOM_BYTES, BLOCK_BYTES = 1 << 30, 4096
"""What a disk that is not full has free, and in blocks of how many bytes it counts that."""
_NAMED = re.compile(r"step-\d{8}")
_create, _write = Disk.create, Disk.write
_rename, _make_directory = Disk.rename, Disk.make_directory


@dataclass(frozen=True, slots=True)
class Change:
    """A change of names that is not on disk. ``undo`` is told where the directory is by then."""

    machine: Machine
    directory: int
    undo: Callable[[Path], object]


@dataclass(slots=True)
class Unsynced:
    """A file of which the first bytes alone are on disk."""

    machine: Machine
    synced: int


class Files:
    """What stands in the place of :class:`penstock.daemons.memory.disk.Disk`, of ``os.write`` and
    of ``os.statvfs``. Files and directories are known by their inodes, as they change their names.
    """

    def __init__(self, path: Path, kernel: Kernel, history: History, disk: JournalDisk) -> None:
        self._path = path
        self._kernel = kernel
        self._history = history
        self._disk = disk
        self._changes: list[Change] = []
        self._unsynced: dict[int, Unsynced] = {}
        self._whole: dict[int, dict[str, int]] = {}
        """Checksums of the files of directories that have been saved states."""
        self._newest: str | None = None
        """The saved state that the scheduler called complete last."""
        self._graves = 0

    # ---- what production asks for ----

    def create(self, process: Process, path: Path) -> BinaryIO:
        self._kernel.point("creates a file")
        self._need_room(path)
        is_new = not path.exists()
        file = _create(DISK, path)
        self._unsynced[_inode(path)] = Unsynced(process.machine, 0)
        if is_new:
            self._changed(process, path.parent, lambda at: (at / path.name).unlink(missing_ok=True))
        return file

    def write(self, process: Process, file: BinaryIO, content: memoryview | bytes) -> None:
        self._kernel.point("writes a file")
        self._need_room(Path(file.name))
        found = os.fstat(file.fileno())
        self._unsynced.setdefault(found.st_ino, Unsynced(process.machine, found.st_size))
        _write(DISK, file, content)

    def sync(self, process: Process, file: BinaryIO) -> None:
        self._kernel.point("syncs a file")
        self._unsynced.pop(os.fstat(file.fileno()).st_ino, None)

    def sync_names(self, process: Process, directory: Path) -> None:
        self._kernel.point("syncs names")
        inode = _inode(directory)
        self._changes = [change for change in self._changes if change.directory != inode]

    def rename(self, process: Process, old: Path, new: Path) -> None:
        self._kernel.point("renames")
        if old.parent != new.parent:
            self._into_base(process, old, new)
            return
        if _NAMED.fullmatch(new.name):
            self._named(old, new.name)
        _rename(DISK, old, new)
        self._changed(process, new.parent, lambda at: _bring_back(at / new.name, at / old.name))

    def _into_base(self, process: Process, old: Path, new: Path) -> None:
        """A file of the base gets its name, with all its bytes on disk."""
        assert new.parent.name == BASE
        if _inode(old) in self._unsynced:
            self._history.violation(f"{new.name} gets its name before its bytes are on disk")
        _rename(DISK, old, new)
        self._changed(process, new.parent, lambda at: (at / new.name).unlink(missing_ok=True))

    def remove(self, process: Process, path: Path) -> None:
        self._kernel.point("removes")
        self._graves += 1
        grave = self._path / REMOVED / str(self._graves)
        grave.parent.mkdir(exist_ok=True)
        path.rename(grave)
        self._changed(process, path.parent, lambda at: _bring_back(grave, at / path.name))

    def make_directory(self, process: Process, path: Path) -> None:
        if not path.exists():
            self._need_room(path)
            _make_directory(DISK, path)
            self._changed(process, path.parent, lambda at: self._unmake(at / path.name, process))

    def append(self, descriptor: int, content: bytes) -> int:
        """``os.write`` of a line: a full disk may take the first half of it."""
        self._kernel.point("appends a line")
        if self._disk.full_beside:
            if len(content) < 2 or self._kernel.random.random() < 0.4:
                self._need_room(self._path)
            content = content[: len(content) // 2]
        return os.write(descriptor, content)

    def room(self) -> SimpleNamespace:
        """``os.statvfs``: what the real disk has free depends on everybody's files, and is said."""
        blocks = 0 if self._disk.full_beside else ROOM_BYTES // BLOCK_BYTES
        return SimpleNamespace(f_bavail=blocks, f_frsize=BLOCK_BYTES)

    # ---- what must hold ----

    def completed(self, state: Path, keep: int) -> None:
        """The scheduler calls a saved state complete: from now on nothing takes it away. So many
        are to be kept, and those that are newer: of before the run went back.
        """
        self._newest = state.name
        kept = [at.name for at in self._directories() if _NAMED.fullmatch(at.name)]
        kept = [name for name in kept if name <= state.name]
        if len(kept) > keep:
            self._history.violation(f"{len(kept)} saved states are kept, not {keep}")

    def _named(self, directory: Path, name: str) -> None:
        """A directory becomes a saved state, whole as it is; or again."""
        inode = _inode(directory)
        files = sorted(directory.iterdir())
        lost = [file.name for file in files if _inode(file) in self._unsynced]
        if lost or any(change.directory == inode for change in self._changes):
            self._history.violation(f"{name} gets its name before all is on disk {lost}")
        if not (directory / MANIFEST_NAME).exists():
            self._history.violation(f"{name} gets its name, and has no manifest")
        for path in _base_of(directory):
            changed = [
                change for change in self._changes if change.directory == _inode(path.parent)
            ]
            if changed or _inode(path) in self._unsynced:
                self._history.violation(f"{name} gets its name before {path.name} is on disk")
        self._whole[inode] = _contents(directory)

    def _look(self) -> None:
        """After a power cut: what has the name of a saved state is one."""
        states = [at for at in self._directories() if _NAMED.fullmatch(at.name)]
        for state in states:
            if _contents(state) != self._whole.get(_inode(state)):
                self._history.violation(f"a power cut leaves a part of {state.name}")
            for path in _base_of(state):
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
                if path.name != base_file(int(path.name.split("-")[1]), digest):
                    self._history.violation(f"a power cut takes {path.name} of {state.name}")
        if self._newest is not None and self._newest not in [state.name for state in states]:
            self._history.violation(f"a power cut takes {self._newest}, which was complete")

    # ---- power cuts ----

    def power_cut(self, machine: Machine, dice: random.Random, *, hosts: bool) -> None:
        """A machine was switched off. ``hosts``: the scheduler was there, which appends to
        ``metrics.jsonl`` and never syncs it.
        """
        self._lose_names(machine, dice)
        for at in self._directories():
            for file in sorted(at.iterdir()):
                found = self._unsynced.get(_inode(file))
                if found is not None and found.machine is machine:
                    _lose_bytes(file, found.synced, dice)
        if hosts:
            with suppress(FileNotFoundError):
                path = self._path / "metrics.jsonl"
                size = path.stat().st_size
                os.truncate(path, size - dice.choice((0, size // 3, min(size, 60))))
        self._unsynced = {i: u for i, u in self._unsynced.items() if u.machine is not machine}
        self._look()

    def _lose_names(self, machine: Machine, dice: random.Random) -> None:
        own = [change for change in self._changes if change.machine is machine]
        self._changes = [change for change in self._changes if change.machine is not machine]
        for inode in dict.fromkeys(change.directory for change in own):
            changes = [change for change in own if change.directory == inode]
            kept = dice.choice((0, len(changes), dice.randint(0, len(changes))))
            for change in reversed(changes[kept:]):
                at = next((at for at in self._directories() if _inode(at) == inode), None)
                if at is not None:
                    change.undo(at)

    def _directories(self) -> Iterator[Path]:
        """Yields the directory of saved states, and those in it."""
        state = self._path / "state"
        if state.is_dir():
            yield state
            yield from sorted(path for path in state.iterdir() if path.is_dir())

    def _unmake(self, path: Path, process: Process) -> None:
        """A directory is not on disk; where others have put files into it, it is. Or it has another
        name by now, which a machine gave it that has power.
        """
        own = path.exists() and all(
            self._unsynced[_inode(file)].machine is process.machine
            for file in path.iterdir()
            if _inode(file) in self._unsynced
        )
        if own:
            shutil.rmtree(path)

    def _changed(self, process: Process, directory: Path, undo: Callable[[Path], object]) -> None:
        self._changes.append(Change(process.machine, _inode(directory), undo))

    def _need_room(self, path: Path) -> None:
        if self._disk.full_beside:
            self._disk.refuse()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _bring_back(grave: Path, path: Path) -> None:
    """What was removed is there again, unless somebody has made it anew: the file server knew."""
    if not path.exists():
        grave.rename(path)


def _inode(path: Path) -> int:
    return path.stat().st_ino


def _base_of(directory: Path) -> list[Path]:
    """Files of the base that a state's manifest lists; none of a manifest that is no JSON."""
    with suppress(StateError):
        return list(base_paths(directory).values())
    return []


def _contents(directory: Path) -> dict[str, int]:
    return {file.name: zlib.crc32(file.read_bytes()) for file in directory.iterdir()}


def _bring_back(here: Path, there: Path) -> None:
    """A file or directory has the name again that it had, unless others have used that since."""
    if here.exists() and not there.exists():
        here.rename(there)


def _lose_bytes(file: Path, synced: int, dice: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, dice.choice((synced, dice.randint(synced, size))))
    if dice.random() < 0.3:
        os.truncate(file, size)  # with zeros


# ---- in the place of production's ----


def _asked(name: str) -> Callable[..., Any]:
    """Returns a method of the disk that asks the cluster's files."""
    real = getattr(Disk, name)

    def call(self: Disk, *args: Any) -> Any:
        found: Any = world.here()
        cluster = getattr(found, "cluster", None)
        if cluster is None:
            return real(self, *args)
        return getattr(cluster.files, name)(found.process, *args)

    return call


class _Os:
    """The module ``os`` of who appends lines, and says how much room there is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, content: bytes) -> int:
        found: Any = world.here()
        cluster = getattr(found, "cluster", None)
        if cluster is None:
            return os.write(descriptor, content)
        written: int = cluster.files.append(descriptor, content)
        return written

    def statvfs(self, path: Path) -> Any:
        found: Any = world.here()
        cluster = getattr(found, "cluster", None)
        return os.statvfs(path) if cluster is None else cluster.files.room()


_real_complete = SavedStates.complete


def _complete(self: SavedStates, save: Any) -> Path:
    state = _real_complete(self, save)
    found: Any = world.here()
    found.cluster.files.completed(state, self._keep)
    return state


_real_prepare = SavedStates.prepare


def _prepare(self: SavedStates, directory: Path) -> None:
    """At times it takes longer than an epoch takes to begin anew, and the next save with it."""
    found: Any = world.here()
    dice = found.process.kernel.random
    found.sleep(dice.random() * dice.choice((1e-3, 1e-3, 1e-3, 0.2)))
    _real_prepare(self, directory)


def replace_files(put: Callable[[Any, str, Any], None]) -> None:
    """Have production ask a cluster's files."""
    for name in (
        *("create", "write", "sync", "sync_names"),
        *("rename", "remove", "make_directory"),
    ):
        put(Disk, name, _asked(name))
    put(SavedStates, "complete", _complete)
    put(SavedStates, "prepare", _prepare)
    put(files_module, "os", _Os())
