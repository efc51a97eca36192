"""``RUN_DIR/metrics.jsonl``: appended by the scheduler, repaired from the journal on start.

The journal has every line first. So the run goes on if a line cannot be written, for example to a
full disk. Missing lines are taken from the journal as soon as the disk has room.
:mod:`penstock.daemons.scheduler.machine.metrics_lines` makes the lines.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from penstock.daemons.scheduler.journal import Journal
from penstock.host.errors import StateError
from penstock.host.files import append_whole, cannot_write, is_no_room, writing

_TAIL_BYTES = 2**16
_LINE_BYTES = 4096
_log = logging.getLogger(__name__)


class MetricsFile:
    """The open file. It always holds whole lines (:func:`penstock.host.files.append_whole`)."""

    def __init__(self, path: Path, journal: Journal) -> None:
        """Opens or creates the file. A full disk is no error.

        Raises:
            StateError: the path is no file.
            ConfigError: the file cannot be written for another reason than a full disk.
        """
        if path.exists() and not path.is_file():
            raise StateError(f"{path}: is no file; move away what is there")
        self._path = path
        self._journal = journal
        self._last = ""
        self._behind = False
        self._descriptor = -1
        try:
            self._open()
        except OSError as error:
            if not is_no_room(error):
                raise cannot_write(path, error, _LINE_BYTES) from error

    def reconcile(self) -> None:
        """Removes an unfinished line that a kill left, and appends newer lines of the journal.

        Raises:
            ConfigError: the file cannot be read or shortened.
            StateError: the file has a step that the journal has lost.
        """
        with writing(self._path, _LINE_BYTES):
            self._last = self._repair_tail() if self._path.exists() else ""
        self._journal.check_beside(self._last)
        missing = self._journal.lines_after(self._last)
        if missing is None:
            _log.warning("%s ends with a line the journal does not know: left as is", self._path)
        else:
            self._write(missing)

    def append(self, line: str) -> None:
        """Appends one journaled line, after earlier lines that are missing."""
        missing = self._journal.lines_after(self._last) if self._behind else None
        lines = missing or [line]
        was_behind = self._behind
        self._write(lines)
        if was_behind and not self._behind:
            _log.warning("%s: complete again, %d lines came late", self._path, len(lines))

    def catch_up(self) -> None:
        """Writes missing lines: no later scheduler may do so.

        Raises:
            StateError: the journal cannot be read.
        """
        if self._behind:
            self._write(self._journal.lines_after(self._last) or [])

    def close(self) -> None:
        """Writes missing lines and closes the file."""
        self.catch_up()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, lines: list[str]) -> None:
        """Appends lines; logs the first failure."""
        try:
            for line in lines:
                append_whole(self._open(), line.encode() + b"\n")
                self._last = line
        except OSError as error:
            if not self._behind:
                reason = cannot_write(self._path, error, _LINE_BYTES)
                _log.warning("%s; lines are kept in the journal meanwhile", reason)
            self._behind = True
        else:
            self._behind = False

    def _open(self) -> int:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        return self._descriptor

    def _repair_tail(self) -> str:
        """Returns the last complete line, and removes bytes after it."""
        with self._path.open("r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            tail = file.read()
            if b"\n" not in tail:  # no metrics end like this
                start = file.seek(0)
                tail = file.read()
            end = tail.rfind(b"\n") + 1
            file.truncate(start + end)
        lines = tail[:end].splitlines()
        return lines[-1].decode(errors="replace") if lines else ""
