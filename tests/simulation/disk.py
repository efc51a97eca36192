"""The journal's disk, in memory, under the real SQLite.

A write counts for processes at once and for the disk from the next sync on. A process that dies in
the middle of a transaction leaves the writes it had made; a power cut also takes some of those that
were not synced, and may tear one. A full disk refuses to grow.
"""

from __future__ import annotations

import ctypes
import random
import sqlite3
import tempfile
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw

from tests.simulation.history import History
from tests.simulation.kernel import Kernel, Process

SECTOR_BYTES = 512


class File:
    """What processes see, and what a power cut would leave with the writes that may be lost."""

    def __init__(self) -> None:
        self.current = bytearray()
        self.durable = bytearray()
        self.unsynced: list[tuple[int, bytes]] = []
        self.owner: Process | None = None

    def write(self, data: bytes, offset: int) -> None:
        """Write as a process sees it."""
        _put(self.current, offset, data)
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        """What was written stays."""
        for offset, data in self.unsynced:
            if offset < 0:
                del self.durable[-offset - 1 :]
            else:
                _put(self.durable, offset, data)
        self.unsynced.clear()

    def truncate(self, size: int) -> None:
        """Cut the file off."""
        del self.current[size:]
        self.unsynced.append((-size - 1, b""))

    def copy(self) -> File:
        """Returns another file with the same content, which is on disk."""
        found = File()
        found.current, found.durable = bytearray(self.current), bytearray(self.current)
        return found

    def lose_power(self, dice: random.Random) -> None:
        """Some of what was not synced is there, in any order; one write may be torn."""
        for offset, data in self.unsynced:
            if dice.random() < 0.5:
                continue
            if offset < 0:
                del self.durable[-offset - 1 :]
                continue
            if dice.random() < 0.2:
                data = data[: SECTOR_BYTES * (len(data) // SECTOR_BYTES // 2)]
            _put(self.durable, offset, data)
        self.unsynced.clear()
        self.current = bytearray(self.durable)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


class Disk:
    """Files by path. ``full``: nothing may grow; ``full_beside``: so for all files but these, which
    may have room left where others need more.
    """

    def __init__(self, kernel: Kernel, history: History) -> None:
        self.kernel = kernel
        self.history = history
        self.files: dict[str, File] = {}
        self.full = self.full_beside = False
        self.was_replaced = False
        """Whether a scheduler may end because its journal is not the one any more."""
        self.opener: Process | None = None
        self._vfs = Files(self)

    def database(self, process: Process, path: Path) -> Database:
        """Open a database for a process."""
        path.touch()  # the journal looks whether its path still leads to the same file
        self.opener = process
        return Database(self, process, path)

    def replace(self, path: Path) -> None:
        """Somebody puts a copy of a database in its place, as a restored backup: who has it open
        goes on with a file that has no name any more.
        """
        self.was_replaced = True
        copy = path.with_name("copy")
        copy.touch()
        copy.replace(path)
        for name in (str(path), f"{path}-wal"):
            if name in self.files:
                self.files[name] = self.files[name].copy()

    def power_cut(self, dice: random.Random) -> None:
        """The machine with the disk was switched off."""
        for file in self.files.values():
            file.lose_power(dice)

    def rows(self, path: Path) -> dict[str, list[tuple[Any, ...]]]:
        """Returns the rows of each table of the database at ``path``, in order of their columns."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            copy = Path(folder) / path.name
            for ending in ("", "-wal"):
                file = self.files.get(f"{path}{ending}", File())
                copy.with_name(f"{path.name}{ending}").write_bytes(file.current)
            with closing(sqlite3.connect(copy)) as connection:
                names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                return {
                    name: sorted(connection.execute(f"SELECT * FROM {name}"), key=repr)
                    for (name,) in sorted(names)
                }

    def refuse(self) -> None:
        """A write was refused."""
        self.history.effective["full disk"] += 1

    def unmount(self) -> None:
        """The seed is over."""
        self._vfs.unregister()


class Files(apsw.VFS):
    """The file system that SQLite sees."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.name = f"simulated-{id(disk)}"
        super().__init__(self.name, base="unix")

    def xOpen(self, name: Any, flags: list[int]) -> Handle:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name or "temporary"
        file = self._disk.files.setdefault(path, File())
        flags[1] = flags[0]
        assert self._disk.opener is not None
        return Handle(self._disk, path, file, self._disk.opener)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        process = self._disk.opener
        if process is None or (process.alive and process.last_point != "disk write"):
            self._disk.files.pop(filename, None)

    def xAccess(self, pathname: str, flags: int) -> bool:
        return pathname in self._disk.files

    def xFullPathname(self, filename: str) -> str:
        return filename


class Handle:
    """An open file."""

    def __init__(self, disk: Disk, path: str, file: File, process: Process) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self._process = process

    @property
    def _dead(self) -> bool:
        return not self._process.alive or self._process.last_point == "disk write"

    def xRead(self, amount: int, offset: int) -> bytes:
        return bytes(self._file.current[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        process = self._process
        if process.steps_left is not None and process.last_point != "disk write":
            process.steps_left -= 1
            if process.steps_left <= 0:
                process.fell = True
                process.last_point = "disk write"  # what follows never gets to the disk
        if self._dead:
            return
        if self._disk.full and offset + len(data) > len(self._file.current):
            self._disk.refuse()
            raise apsw.FullError("no space left on device")
        self._file.write(bytes(data), offset)

    def xTruncate(self, size: int) -> None:
        if not self._dead:
            self._file.truncate(size)

    def xSync(self, flags: int) -> None:
        if not self._dead:
            self._file.sync()

    def xFileSize(self) -> int:
        return len(self._file.current)

    def xLock(self, level: int) -> None:
        owner = self._file.owner
        if owner is not None and owner is not self._process and owner.alive:
            raise apsw.BusyError("locked by another process")
        self._file.owner = self._process

    def xUnlock(self, level: int) -> None:
        if level == 0 and self._file.owner is self._process:
            self._file.owner = None

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, op: int, pointer: int) -> bool:
        if op != apsw.SQLITE_FCNTL_HAS_MOVED:
            return False
        moved = self._disk.files.get(self._path) is not self._file
        ctypes.c_int.from_address(pointer).value = moved
        return True

    def xSectorSize(self) -> int:
        return SECTOR_BYTES

    def xDeviceCharacteristics(self) -> int:
        return 0

    def xClose(self) -> None:
        self.xUnlock(0)


class Database:
    """``sqlite3.Connection`` over the simulated disk, with points at which its process may die."""

    def __init__(self, disk: Disk, process: Process, path: Path) -> None:
        self._disk = disk
        self._process = process
        self._connection = _converted(lambda: apsw.Connection(str(path), vfs=disk._vfs.name))
        process.at_death.append(self._abandon)

    @property
    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction)

    def execute(self, sql: str, values: Any = ()) -> Any:
        kernel, self._disk.opener = self._process.kernel, self._process
        if sql == "COMMIT":
            kernel.point("before the journal")
        try:
            return _converted(lambda: self._connection.execute(sql, values))
        finally:
            self._die_if_due()
            if sql == "COMMIT":
                kernel.point("journaled")

    def executemany(self, sql: str, rows: Iterable[Any]) -> Any:
        return _converted(lambda: self._connection.executemany(sql, rows))

    def executescript(self, sql: str) -> Any:
        return _converted(lambda: self._connection.execute(sql))

    def close(self) -> None:
        with suppress(apsw.Error):  # of the checkpoint, which SQLite then leaves to the next opener
            self._connection.close()
        self._die_if_due()

    def _die_if_due(self) -> None:
        """The process died in the middle of a write: it does nothing more."""
        kernel = self._process.kernel
        if self._process.last_point == "disk write" and not kernel.closed:
            self._process.kill()
            kernel.park_forever()

    def _abandon(self) -> None:
        """The process is dead: nothing of a transaction that was under way counts."""
        for file in self._disk.files.values():
            if file.owner is self._process:
                file.owner = None
        # The handle is kept: closing it would write. It is dropped with the seed.


_CODES = {apsw.FullError: sqlite3.SQLITE_FULL, apsw.BusyError: sqlite3.SQLITE_BUSY}


def _converted(work: Any) -> Any:
    """Errors as those of the standard library's module."""
    try:
        return work()
    except apsw.Error as error:
        converted = sqlite3.OperationalError(str(error))
        converted.sqlite_errorcode = _CODES.get(type(error), sqlite3.SQLITE_ERROR)
        raise converted from error
