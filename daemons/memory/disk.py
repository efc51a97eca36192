"""The disk operations of saved states, as one small port, so that a test can record or refuse each
call.

A power cut keeps synced bytes, and any part of the rest. Writers of saved states therefore order
their calls: content, then :meth:`Disk.sync` of its file, then :meth:`Disk.sync_names` of the
directory. Then follow the rename that makes the content count, and the names above it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from penstock.host.files import make_directory, sync_directory

_LIBC = ctypes.CDLL(None)
_OFFSET = ctypes.c_int64
_WRITE = 2  # SYNC_FILE_RANGE_WRITE


class Disk:
    """The real one."""

    def create(self, path: Path) -> BinaryIO:
        """Opens a new file for writing, in place of an existing one.

        Raises:
            OSError: it cannot be made. So for all that follow.
        """
        return path.open("wb", buffering=0)

    def reopen(self, path: Path) -> BinaryIO:
        """Opens an existing file for writing at any place, and keeps its content.

        Raises:
            OSError: it is not there, or is a link.
        """
        return open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb", buffering=0)

    def require(self, directory: Path, num_bytes: int) -> None:
        """Checks that a disk has ``num_bytes`` free. A file system that reports no size passes.

        Raises:
            OSError: ENOSPC, if fewer bytes are free.
        """
        status = os.statvfs(directory)
        if status.f_blocks and status.f_bavail * status.f_frsize < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))

    def write(self, file: BinaryIO, content: memoryview | bytes) -> None:
        """Appends all of ``content``, which need not be on disk yet."""
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]

    def begin_sync(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        """Lets the kernel write a range of the file to disk, and does not wait. Only :meth:`sync`
        tells whether the bytes are there. File systems without this call write later.
        """
        _LIBC.sync_file_range(file.fileno(), _OFFSET(start), _OFFSET(num_bytes), _WRITE)

    def sync(self, file: BinaryIO) -> None:
        """Returns after the file's content is on disk."""
        os.fsync(file.fileno())

    def sync_names(self, directory: Path) -> None:
        """Returns after the names in a directory are on disk."""
        sync_directory(directory)

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file or directory atomically."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Removes a file, or a directory with its content."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def make_directory(self, path: Path) -> None:
        """Makes a directory and its parents, if they are missing.

        Raises:
            PenstockError: it cannot be made.
        """
        make_directory(path)


DISK = Disk()
