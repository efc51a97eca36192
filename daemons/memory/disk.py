"""What saved states ask of a disk: one small port, so that a test can record or refuse each call.

A power cut keeps what was synced, and any part of the rest. So writers of saved states order their
calls: content, then :meth:`Disk.sync` of its file, then :meth:`Disk.sync_names` of the directory,
then the rename that makes it count, then the names above it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from penstock.host.files import make_directory, sync_directory


class Disk:
    """The real one."""

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing, in place of one that is there.

        Raises:
            OSError: it cannot be made. So for all that follow.
        """
        return path.open("wb", buffering=0)

    def write(self, file: BinaryIO, content: memoryview | bytes) -> None:
        """Append all of ``content``; it need not be on disk yet."""
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: BinaryIO) -> None:
        """Return when the file's content is on disk."""
        os.fsync(file.fileno())

    def sync_names(self, directory: Path) -> None:
        """Return when the names in a directory are on disk."""
        sync_directory(directory)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or directory another name, at once or not at all."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a directory with all that is in it, or a file."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, if they are not there.

        Raises:
            PenstockError: it cannot be made.
        """
        make_directory(path)


DISK = Disk()
