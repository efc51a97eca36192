"""``RUN_DIR/metrics.jsonl``: appended by the scheduler, repaired from the journal on start."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.daemons.scheduler.journal import Journal

_TAIL_BYTES = 2**16
_log = logging.getLogger(__name__)


class MetricsFile:
    """The open file. Each line is written with one call, so readers see whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def reconcile(self, journal: Journal) -> None:
        """Cut off a line that a kill left half written; append what the journal has beyond it."""
        last = self._repair_tail()
        missing = journal.lines_after(last)
        if missing is None:
            _log.warning("%s ends with a line the journal does not know: left as is", self._path)
            return
        for line in missing:
            self.append(line)

    def append(self, line: str) -> None:
        """Add one line."""
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _repair_tail(self) -> str:
        """The last complete line; what follows it is cut off."""
        size = self._path.stat().st_size
        start = max(0, size - _TAIL_BYTES)
        with self._path.open("rb") as file:
            file.seek(start)
            tail = file.read()
        end = tail.rfind(b"\n") + 1
        self._file.truncate(start + end)
        lines = tail[:end].splitlines()
        return lines[-1].decode(errors="replace") if lines else ""
