"""Writing and reading files that may meet a full disk, or be something else than they should.

A failed write raises an error that names the file and the room it needs (exit code 3 if room is
missing). A failed read raises an error that names the file. Files that a run can do without, such
as logs, are appended to with :func:`append_whole`; its callers continue after a failure.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from penstock.host.errors import CapacityError, ConfigError, PenstockError, StateError, reason
from penstock.host.trust import UntrustedError, open_own, owners_in

DAMAGED = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
"""Errors that unexpected JSON raises while values are taken out of it."""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_FALLOC_FL_KEEP_SIZE = 1
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""A full disk, a quota, and a limit of this process on the size of files."""

_BLOCK_BYTES = 4096
"""Bytes that the smallest file takes on a disk."""


def is_no_room(error: OSError) -> bool:
    """Returns whether the disk, a quota or a limit has no room."""
    return error.errno in _NO_ROOM


def free_bytes(path: Path) -> int:
    """Returns the bytes free on the disk of ``path``, or where it would be made."""
    for place in (path, *path.absolute().parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue  # not made yet
        return status.f_bavail * status.f_frsize
    return 0


def no_room(path: Path, needed: int) -> CapacityError:
    """Returns the error that ``path`` has no room for ``needed`` bytes."""
    return CapacityError(
        f"{path}: no space left on its disk: at least {needed:,} bytes are needed,"
        f" {free_bytes(path):,} are free (or a quota or limit is reached); free some space there,"
        " then the same command goes on"
    )


def cannot_write(path: Path, error: OSError, needed: int) -> PenstockError:
    """Returns the error to raise when writing ``needed`` bytes to ``path`` failed."""
    if is_no_room(error):
        return no_room(path, needed)
    return ConfigError(f"{path}: cannot write it: {error.strerror or error}")


def unforeseen(error: OSError, place: Path) -> PenstockError:
    """Returns the error to raise for an unexpected error of the operating system. Its place is
    ``place`` unless the error names a file.
    """
    path = Path(error.filename) if isinstance(error.filename, str) else place
    if is_no_room(error):
        return no_room(path, _BLOCK_BYTES)
    return ConfigError(f"{path}: {error.strerror or error!r}")


@contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Turns errors of the operating system inside the block into those of :func:`cannot_write`.

    Raises:
        CapacityError: there is no room for the ``needed`` bytes.
        ConfigError: ``path`` cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, needed) from error


def append_whole(descriptor: int, content: bytes) -> None:
    """Appends all of ``content`` or nothing, also when a disk fills up in the middle of it.

    ``descriptor`` is open with O_APPEND, and no other process appends to its file.

    Raises:
        OSError: ``content`` cannot be appended; a part that was written is cut off again.
    """
    done = 0
    try:
        while done < len(content):
            done += os.write(descriptor, content[done:])
    except OSError:
        if done:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - done)
        raise


def reserve(descriptor: int, num_bytes: int) -> None:
    """Reserves room for the first bytes of a file, so that appending them meets no full disk. The
    file's size stays. Does nothing on file systems without such reservations.

    Raises:
        OSError: there is no such room.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if libc.fallocate(descriptor, _FALLOC_FL_KEEP_SIZE, 0, num_bytes) != 0:
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if is_no_room(error):
            raise error


def preallocate(descriptor: int, size: int) -> None:
    """Sets the size of a file that will be mapped, and reserves room for all of it. On a full disk
    a page without room would kill the process that touches it.

    Raises:
        OSError: there is no such room.
    """
    os.ftruncate(descriptor, size)
    os.posix_fallocate(descriptor, 0, size)


def write_new(path: Path, text: str) -> None:
    """Writes a file that an option ``--out`` names.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path}: exists; name another file with --out") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {reason(error)}") from error


def write_atomically(path: Path, text: str | bytes) -> None:
    """Writes a file so that readers see the old content or the new, also after a crash.

    Raises:
        CapacityError: there is no room for it.
        ConfigError: it cannot be written for another reason, such as a directory of its name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    content = text.encode() if isinstance(text, str) else text
    with writing(path, len(content)):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                # Before the rename: a crash could otherwise leave the name with an empty file.
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        # The new name is on disk only when the directory is.
        sync_directory(path.parent)


def follow_umask(folder: Path) -> None:
    """Gives the files below a folder the permissions of a new file of this process.

    Libraries write through private files of mode 0600, and keep that mode.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    umask = next(int(line.split()[1], 8) for line in status.splitlines() if line[:6] == "Umask:")
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)


def holds_text(path: Path, text: str) -> bool:
    """Returns whether a file contains exactly ``text``, so that it need not be written again."""
    try:
        return path.read_bytes() == text.encode()
    except (FileNotFoundError, IsADirectoryError):
        return False


def open_lock(path: Path, flags: int) -> int:
    """Returns a descriptor of a lock's file.

    Raises:
        ConfigError: the name leads to something else than a file of this user.
        OSError: the file cannot be opened.
    """
    try:
        return open_own(path, flags, owners=owners_in(path.parent), forbidden=stat.S_IWOTH)
    except UntrustedError as error:
        raise ConfigError(f"{error}, and a lock of this run is due there: move it away") from error


def is_locked(descriptor: int) -> bool:
    """Returns whether a process holds a lock (``flock``) on a file. The probe asks for a shared
    lock: on NFS an exclusive one needs a descriptor that is open for writing (flock(2)).
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def sync_directory(directory: Path) -> None:
    """Forces the names in a directory to disk.

    Raises:
        OSError: the disk does not take them.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> None:
    """Exchanges two names of one file system in one call (renameat2).

    Raises:
        OSError: the file system cannot, or refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(one), None, str(other))


def make_directory(path: Path) -> None:
    """Makes a directory and its parents, if they do not exist.

    Raises:
        CapacityError: the disk has no room for it.
        StateError: a file is in the way.
        ConfigError: it cannot be made for another reason.
    """
    try:
        with writing(path, _BLOCK_BYTES):
            path.mkdir(parents=True, exist_ok=True)
    except ConfigError as error:
        if isinstance(error.__cause__, (FileExistsError, NotADirectoryError)):
            raise StateError(f"{path}: a file is where a directory is due; move it away") from error
        raise


def is_file(path: Path) -> bool:
    """Returns whether ``path`` is a regular file, or a link to one.

    Raises:
        StateError: there is something else by that name, or its folder cannot be searched.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise StateError(f"{path}: is {kind}, and a regular file is due there")
    return True


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises one kind of error for everything that is no JSON, also for too deep
    nesting.

    Raises:
        ValueError: names the mistake.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value of JSON is a number that fits into 64 bits of floating point."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max
