"""Folders in TMPDIR for the time of a command.

A killed command leaves its folder. The next command removes such folders: a living command holds a
lock (``flock``) on its folder. A new folder has no lock for a moment, in which another command may
remove the folder. So the creator checks that its locked folder is still there, and else makes
another one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_START = "penstock-"
_MARK = "."
"""Stands behind the purpose in a name. Folders of older versions have no lock, and another mark."""


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Yields an empty folder of this process, which is removed at the end. Removes folders that
    killed processes of this user have left.
    """
    remove_abandoned()
    folder, descriptor = _locked(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(descriptor)


def remove_abandoned() -> None:
    """Removes folders of this user's dead processes. Errors leave a folder for the next command."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_START}*{_MARK}*"):
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.fstat(descriptor).st_uid == os.geteuid()
                if is_ours and _is_at(folder, descriptor):
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _locked(purpose: str) -> tuple[Path, int]:
    """Returns a new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_START}{purpose}{_MARK}"))
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another command has removed it already
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another command is about to remove it
        except OSError:
            return folder, descriptor  # without locks on this file system no command removes it
        else:
            if _is_at(folder, descriptor):
                return folder, descriptor
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False
