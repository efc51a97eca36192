"""What must hold of a run that ended after faults, beside the one that nobody disturbed."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.chaos.processes import survivors
from penstock.client.views.run_view import all_metrics
from penstock.host.errors import LostMemberError, StateError
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.control import Decision
from penstock.shm.segment import list_segments

Row = tuple[Any, ...]
_STEP_KEYS = ("phase", "step", "data_epoch", "decision", "loss", "lr", "loss_scale", "tokens")
"""What of a line of metrics follows from the data alone."""

_OF_THE_MACHINE = ("checksum", "hold")
"""What of a position may differ: the checksum is of the whole row, with epoch and attempt; when a
hold pays is measured.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a finished run did. ``decisions``: decision, version and position of each row of the
    journal but fillings of memory, oldest first; ``undone``: those of them, and those lines of
    metrics, that a filling with an older state took back; ``files``: SHA-256 of each file of each
    saved state but manifests.
    """

    steps: int
    lines: tuple[Row, ...]
    decisions: tuple[Row, ...]
    undone: frozenset[Row]
    files: dict[str, str]

    @classmethod
    def of(cls, run_dir: Path, steps: int) -> Trained:
        """Reads a finished run.

        Raises:
            StateError: it is none, or has not saved its last step.
        """
        decisions, undone = _decisions(run_dir)
        lines: dict[bool, list[Row]] = {False: [], True: []}
        for line in all_metrics(run_dir):
            lines[line["attempt"] in undone].append(tuple(line.get(key) for key in _STEP_KEYS))
        trained = cls(
            steps=steps,
            lines=tuple(lines[False]),
            decisions=decisions,
            undone=frozenset((*undone.values(), *lines[True])),
            files=_files(run_dir),
        )
        if not trained.last_files:
            raise StateError(f"{run_dir}: step {steps} is not saved: the run has not finished")
        return trained

    @property
    def last_files(self) -> dict[str, str]:
        """The files of the last step."""
        prefix = f"state/step-{self.steps:08d}/"
        return {name: digest for name, digest in self.files.items() if name.startswith(prefix)}


def check(run_dir: Path, undisturbed: Trained) -> None:
    """Holds a finished run against the undisturbed one.

    Raises:
        LostMemberError: a step, sample, decision or byte differs, or something is left over.
    """
    found = Trained.of(run_dir, undisturbed.steps)
    _check_rows("journal.sqlite", found.decisions, undisturbed.decisions)
    for phase in ("train", "eval"):
        lines, wanted = (
            tuple(line for line in trained.lines if line[0] == phase)
            for trained in (found, undisturbed)
        )
        _check_rows(f"metrics.jsonl ({phase})", lines, wanted)
    if otherwise := found.undone - {*undisturbed.decisions, *undisturbed.lines}:
        raise LostMemberError(
            f"{run_dir}: steps were otherwise before they were done again: {otherwise}"
        )
    missing = undisturbed.last_files.keys() - found.files.keys()
    # A run that was asked to end has saved other steps, too.
    other = [
        name
        for name in found.files.keys() & undisturbed.files.keys()
        if found.files[name] != undisturbed.files[name]
    ]
    if missing or other:
        raise LostMemberError(
            f"{run_dir}: other bytes in {sorted(other)}, none of {sorted(missing)}"
        )
    check_nothing_left(run_dir)


def check_nothing_left(run_dir: Path) -> None:
    """Looks for what a finished run should have taken away.

    Raises:
        LostMemberError: names processes, segments or temporary files.
    """
    processes = survivors(run_dir)
    segments = list_segments(f"/penstock-{RunDirectory(run_dir).run_id}-")
    files = [str(path) for path in (*run_dir.glob(".*.tmp"), *run_dir.glob("state/.tmp-*"))]
    if processes or segments or files:
        raise LostMemberError(
            f"{run_dir}: left over: {processes or ''} {segments or ''} {files or ''}"
        )


def _check_rows(source: str, found: tuple[Row, ...], wanted: tuple[Row, ...]) -> None:
    if found == wanted:
        return
    for number, (one, other) in enumerate(zip(found, wanted, strict=False), 1):
        if one != other:
            raise LostMemberError(f"{source}: row {number} is {one}, undisturbed {other}")
    raise LostMemberError(f"{source}: {len(found)} rows, undisturbed {len(wanted)}")


def _decisions(run_dir: Path) -> tuple[tuple[Row, ...], dict[int, Row]]:
    """Returns what was decided, and attempt -> what was decided and taken back."""
    path = run_dir / "journal.sqlite"
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as journal:
            rows = journal.execute(
                "SELECT attempt, decision, version, position FROM decisions ORDER BY seq"
            ).fetchall()
    except sqlite3.Error as error:
        raise StateError(f"{path}: cannot be read as a journal: {error}") from error
    standing: list[tuple[int, int, Row]] = []
    undone: dict[int, Row] = {}
    for attempt, decision, version, position in rows:
        fields = {k: v for k, v in json.loads(position).items() if k not in _OF_THE_MACHINE}
        place = fields["data_position"]
        if decision == Decision.RESTORE:
            undone |= {tried: row for at, tried, row in standing if at > place}
            standing = [(at, tried, row) for at, tried, row in standing if at <= place]
        else:
            row = (decision, version, tuple(sorted(fields.items())))
            standing.append((place, attempt, row))
    return tuple(row for _, _, row in standing), undone


def _files(run_dir: Path) -> dict[str, str]:
    found = {}
    for path in sorted((run_dir / "state").glob("step-*/*.safetensors")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found[str(path.relative_to(run_dir))] = digest
    return found
