"""Notes of processes that wait for a taken port, for ``penstock status``.

``RUN_DIR/waits/NAME`` is there while the process waits, and is renewed meanwhile. A note that is
older was left by a process that was killed.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from penstock.host.errors import PenstockError
from penstock.host.files import make_directory, write_atomically

FOLDER = "waits"
VALID_S = 60.0
"""Seconds for which a note counts; a process that waits renews its note every second or so."""

_log = logging.getLogger(__name__)


class WaitNote:
    """The note of the process ``name``; :meth:`clear` it in any case."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path = run_dir / FOLDER / name
        self._text = ""

    def renew(self, text: str) -> None:
        """Says what the process waits for. A note that cannot be written is left out."""
        try:
            if text != self._text:
                make_directory(self._path.parent)
                write_atomically(self._path, f"{' '.join(text.split())}\n")
                self._text = text
            os.utime(self._path)
        except (OSError, PenstockError) as error:
            self._text = ""
            _log.warning("%s: cannot say what this process waits for: %s", self._path, error)

    def clear(self) -> None:
        """Removes the note: the process waits no longer."""
        if not self._text:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s is left behind: %s", self._path, error)


def waits(run_dir: Path) -> dict[str, str]:
    """Returns what processes of a run wait for now: name -> text."""
    texts: dict[str, str] = {}
    for path in sorted((run_dir / FOLDER).glob("[!.]*")):
        try:
            if time.time() - path.stat().st_mtime < VALID_S:
                texts[path.name] = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue  # the process has its port meanwhile
    return texts
