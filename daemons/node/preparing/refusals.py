"""Restores a run directory when its preparation is refused or interrupted.

The preparation's small files are read before it, and written back with their times. Token files are
excluded: if a preparation has replaced some, all files stay as the preparation left them, and the
next start prepares them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.host.files import write_atomically
from penstock.protocol.run.checksums import CHECKED_FILES, CHECKSUMS
from penstock.protocol.run.numerics import KERNELS

_DATA = "data/meta.json"
_WRITTEN = (
    *CHECKED_FILES,
    "model/meta.json",
    "model/sharing.json",
    "places.json",
    KERNELS,
    "software.json",
    "search.json",
    ".home",
    CHECKSUMS,
)
"""Files in the order in which they are written back: checksums follow their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """A file before the preparation. ``content``: None if it was missing. ``times_ns``: times of
    its last access and change.
    """

    path: Path
    content: bytes | None
    times_ns: tuple[int, int] = (0, 0)

    def put_back(self) -> None:
        """Writes the file if it has changed since, and removes it where it was missing."""
        if self.content is None:
            self.path.unlink(missing_ok=True)
        elif _content(self.path) != self.content:
            write_atomically(self.path, self.content.decode())
            os.utime(self.path, ns=self.times_ns)


@contextmanager
def unchanged_if_refused(run_dir: Path) -> Iterator[None]:
    """Writes the files of a prepared run back if the block raises. A directory without checksums
    has no such files.
    """
    if not (run_dir / CHECKSUMS).is_file():
        yield
        return
    before = [_read(run_dir / name) for name in _WRITTEN]
    data = _content(run_dir / _DATA)
    try:
        yield
    except BaseException:
        if _content(run_dir / _DATA) == data:
            for entry in before:
                entry.put_back()
        raise


def _read(path: Path) -> _Before:
    content = _content(path)
    if content is None:
        return _Before(path=path, content=None)
    status = path.stat()
    times_ns = (status.st_atime_ns, status.st_mtime_ns)
    return _Before(path=path, content=content, times_ns=times_ns)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
