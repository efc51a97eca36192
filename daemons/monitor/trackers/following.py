"""Reads ``metrics.jsonl`` from where a tracker stopped, and remembers how far it got."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.daemons.monitor.trackers.sink import Reading
from penstock.host.files import DAMAGED, parse_json, write_atomically

MAX_BATCH_BYTES = 1 << 18
"""At most so much is read at a time: some 600 lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """A tracker's position: bytes of the file, accepted lines, and dropped lines.

    ``failures``: failed attempts in a row at the next lines.
    """

    offset: int = 0
    lines: int = 0
    dropped: int = 0
    failures: int = 0

    @classmethod
    def read(cls, path: Path) -> Bookmark:
        """Returns what the file says; the beginning where there is none, or it is damaged."""
        try:
            fields = parse_json(path.read_bytes())
            bookmark = cls(**{name: int(fields[name]) for name in cls.__slots__})
        except (OSError, *DAMAGED):
            return cls()
        return bookmark if min(asdict(bookmark).values()) >= 0 else cls()

    def write(self, path: Path) -> None:
        """Writes it.

        Raises:
            PenstockError: there is no room, or another reason.
        """
        write_atomically(path, json.dumps(asdict(self)))


def bookmark_path(run_dir: Path, tracker: str) -> Path:
    """Returns where a tracker's place is kept."""
    return run_dir / "trackers" / f"{tracker}.json"


def read_batch(path: Path, offset: int, now_s: float) -> tuple[list[Reading], int]:
    """Returns the complete lines after ``offset`` that fit in a batch, and the offset after them. A
    file shorter than ``offset`` was replaced, and is read from its start.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        if file.seek(0, 2) < offset:
            offset = 0
        file.seek(offset)
        text = file.read(MAX_BATCH_BYTES)
    whole = text[: text.rfind(b"\n") + 1]
    if not whole and len(text) == MAX_BATCH_BYTES:  # no line of ours is as long
        whole = text
    readings = (_reading(line, now_s) for line in whole.splitlines())
    return [reading for reading in readings if reading is not None], offset + len(whole)


def _reading(line: bytes, now_s: float) -> Reading | None:
    try:
        return Reading.of(parse_json(line), now_s)
    except ValueError:
        return None
