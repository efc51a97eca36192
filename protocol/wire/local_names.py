"""Names of local sockets that no other user can take: files in a folder of the run's user.

Every user of a machine can bind a name in the abstract namespace as soon as the process that had
the name is dead. Its replacement cannot listen then. So a node's sockets are in
``/dev/shm/.penstock-<run id>-<node>/``, mode 0700. /dev/shm is sticky. Only the folder's owner
removes or renames the folder, so a name stays the user's until its run ends.

A socket's file stays when its process is killed. A lock next to the file (``flock``) belongs to the
living process: the next process takes the lock, and removes the file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from penstock.host import world
from penstock.host.errors import ConfigError, LostMemberError, StateError
from penstock.host.files import is_locked
from penstock.host.logs import Complaints
from penstock.protocol.run.names import FOLDER_PREFIX, SOCKET_FOLDERS, socket_folder
from penstock.protocol.security.token import user_name

PATIENCE_S = 2.0
"""Seconds to wait for a lock: a killed process may hold its lock a moment longer."""
FOREIGN_PATIENCE_S = 60.0
"""Seconds to wait for a folder that another user has taken during the run."""
_RETRY_S = 0.1
_LOCK = ".lock"
_NODE = "node"
_PREFIX = "ipc://"

_log = logging.getLogger(__name__)


class ForeignFolderError(ConfigError):
    """The folder of a node's sockets is not this user's alone."""


class LocalName:
    """The name of a local socket, held by this process until :meth:`release`."""

    def __init__(self, path: Path | None, lock: int = -1) -> None:
        self._path = path
        self._lock = lock

    @classmethod
    def take(cls, address: str, what: str) -> LocalName:
        """Returns the name that the socket at ``address`` (``ipc://PATH``, or a path) will be bound
        to, when no living process has it. ``what``: the kind of process, for errors. Does nothing
        for abstract names, which the kernel gives to one process, and in a world with simulated
        sockets.

        Raises:
            StateError: another process of this user has the name.
            LostMemberError: another user has the folder, and keeps it for FOREIGN_PATIENCE_S.
        """
        path = Path(address.removeprefix(_PREFIX))
        if not path.is_absolute() or not world.here().guards_sockets:
            return cls(None)
        _await_folder(path.parent)
        deadline_s = world.monotonic() + PATIENCE_S
        while (lock := _try_lock(path)) is None:
            if world.monotonic() >= deadline_s:
                raise StateError(f"another {what} of this run is alive: it listens on {address}")
            world.sleep(_RETRY_S)
        path.unlink(missing_ok=True)
        return cls(path, lock)

    def release(self) -> None:
        """Frees the name for another process, after the socket is closed. A second call does
        nothing.
        """
        if self._path is None:
            return
        path, self._path = self._path, None
        # The socket's file goes while the lock is held: later it may be another process's. The
        # lock's file goes before the lock: _try_lock of another process checks for that.
        path.unlink(missing_ok=True)
        _lock_path(path).unlink(missing_ok=True)
        os.close(self._lock)
        with suppress(OSError):  # other processes of the node have names there
            path.parent.rmdir()


def prepare_folder(run_id: str, node: str) -> LocalName:
    """Makes the folder of a node, or empties it; all processes of the node are dead. The folder is
    never removed, or another user could take its name. The returned name, of the node itself, keeps
    the folder from being removed.

    Raises:
        ForeignFolderError: another user has the folder.
    """
    folder = socket_folder(run_id, node)
    _make_folder(folder)
    node_path = folder / _NODE
    name = LocalName.take(str(node_path), "node")
    for path in folder.iterdir():
        if path != _lock_path(node_path):
            path.unlink()
    return name


def remove_folder(run_id: str, node: str) -> None:
    """Removes the folder of a node with dead processes only; another user's folder stays."""
    folder = socket_folder(run_id, node)
    with suppress(FileNotFoundError, ForeignFolderError):
        check_folder(folder)
        shutil.rmtree(folder)


def left_folders() -> list[Path]:
    """Returns this user's folders in which no living process has a name: whole nodes were
    killed.
    """
    folders = []
    for folder in sorted(SOCKET_FOLDERS.glob(f"{FOLDER_PREFIX}*")):
        with suppress(FileNotFoundError, ForeignFolderError):
            check_folder(folder)
            if not any(_is_held(lock) for lock in folder.glob(f"*{_LOCK}")):
                folders.append(folder)
    return folders


def check_folder(folder: Path) -> None:
    """Refuses a folder that other users may use: they could bind sockets there.

    Raises:
        FileNotFoundError: there is no such folder.
        ForeignFolderError: names the owner.
    """
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not mode & 0o077:
        return
    kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
    raise ForeignFolderError(
        f"{folder}: is a {kind} of {user_name(status.st_uid)}, mode {mode:o}; the sockets of this"
        f" node belong into a folder of {user_name(os.geteuid())} with mode 700: have it removed"
    )


def _make_folder(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_folder(folder)


def _await_folder(folder: Path) -> None:
    """Makes or checks the folder. While another user has it, waits and logs the owner."""
    complaints, deadline_s = Complaints(_log), world.monotonic() + FOREIGN_PATIENCE_S
    while True:
        try:
            if folder.parent == SOCKET_FOLDERS:
                _make_folder(folder)
            return
        except ForeignFolderError as error:
            if world.monotonic() >= deadline_s:
                raise LostMemberError(str(error)) from error
            complaints.say(f"{error}; waiting")
        except FileNotFoundError:
            pass  # removed between the two calls
        world.sleep(_RETRY_S)


def _try_lock(path: Path) -> int | None:
    """Returns the descriptor of the locked file next to ``path``; None: another process has it."""
    place = _lock_path(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(place, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)  # its last user removed it just now
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before may have removed the file between the two calls.
        if os.path.samestat(os.fstat(lock), place.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _is_held(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)
