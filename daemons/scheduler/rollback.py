"""Rollback to a saved state: journal and metrics forget later rows.

Numbers of epochs and attempts are never used again. So the numbers and traces of the removed steps
differ from those of their repetition. The journal gets a new incarnation. Memory that still holds a
later step belongs to the old one, so the next start fills it again.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from penstock.daemons.memory.snapshot import MANIFEST_NAME, read_manifest
from penstock.daemons.monitor.trackers.following import Bookmark
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.position import Position
from penstock.host.errors import StateError
from penstock.host.files import parse_json, write_atomically
from penstock.protocol.run.rundir import RunDirectory


def go_back(run: RunDirectory, directory: Path, version: int) -> None:
    """Makes the next start go on from the saved state in ``directory``.

    The journal is last, since it is the truth: metrics that were cut back are completed from a
    journal that was not.

    Raises:
        StateError: the journal, or the manifest's position, is damaged, or a scheduler has it open.
        CapacityError, ConfigError: the disk does not take it.
    """
    path = directory / MANIFEST_NAME
    fields = read_manifest(directory).scheduler
    position = Position.from_fields(fields, str(path))
    attempt = fields.get("attempt")
    if position.version != version or type(attempt) is not int or attempt < 0:
        raise StateError(f"{path}: says no attempt after which step {version} was saved")
    journal = Journal(run.path / "journal.sqlite", run.run_id)
    try:
        _cut_metrics(run.path, attempt)
        journal.go_back(position, attempt, secrets.randbits(63) or 1)
    finally:
        journal.close()


def _cut_metrics(run_dir: Path, attempt: int) -> None:
    """Removes the lines after ``attempt``, and moves the trackers' bookmarks back."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = "".join(line for line in lines if line_attempt(line) <= attempt)
    write_atomically(path, kept)
    for file in sorted((run_dir / "trackers").glob("*.json")):
        place = Bookmark.read(file)
        size = len(kept.encode())
        if place.offset > size:
            replace(place, offset=size).write(file)


def line_attempt(line: str) -> int:
    """Returns the attempt of a line of metrics; 0 for a line of another program."""
    try:
        attempt = parse_json(line)["attempt"]
    except (ValueError, TypeError, KeyError):
        return 0
    return attempt if type(attempt) is int else 0
