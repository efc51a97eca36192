"""Checks of a run that ended after faults, against a run without faults."""

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
from penstock.protocol.run.saved_base import BASE
from penstock.shm.control import Decision
from penstock.shm.segment import list_segments

Row = tuple[Any, ...]
_STEP_KEYS = ("phase", "step", "data_epoch", "decision", "loss", "lr", "loss_scale", "tokens")
"""Fields of a line of metrics that follow from the data alone."""

_OF_THE_MACHINE = ("checksum", "hold")
"""Fields of a position that may differ between runs. The checksum covers the whole row with epoch
and attempt; measured times decide about a hold.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Results of a finished run.

    ``decisions`` holds decision, version and position of each row of the journal, oldest first,
    without rows of restored memory. ``undone`` holds rows and lines of metrics that a restore of an
    older state took back. ``files`` holds the SHA-256 of each file of each saved state, without
    manifests.
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
            StateError: the run has not saved its last step, or its journal is damaged.
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
        """The files of the last step and of the base, with their SHA-256."""
        prefixes = (f"state/step-{self.steps:08d}/", f"state/{BASE}/")
        return {name: digest for name, digest in self.files.items() if name.startswith(prefixes)}


def check(run_dir: Path, undisturbed: Trained) -> None:
    """Compares a finished run with the undisturbed run.

    Raises:
        LostMemberError: a step, sample, decision or byte differs, or something is left over.
    """
    trained = Trained.of(run_dir, undisturbed.steps)
    _check_rows("journal.sqlite", trained.decisions, undisturbed.decisions)
    for phase in ("train", "eval"):
        lines, expected = (
            tuple(line for line in run.lines if line[0] == phase) for run in (trained, undisturbed)
        )
        _check_rows(f"metrics.jsonl ({phase})", lines, expected)
    if different := trained.undone - {*undisturbed.decisions, *undisturbed.lines}:
        raise LostMemberError(
            f"{run_dir}: steps had other results before they were repeated: {different}"
        )
    missing = undisturbed.last_files.keys() - trained.files.keys()
    # A stopped run has also saved other steps.
    changed = [
        name
        for name in trained.files.keys() & undisturbed.files.keys()
        if trained.files[name] != undisturbed.files[name]
    ]
    if missing or changed:
        raise LostMemberError(
            f"{run_dir}: bytes differ in {sorted(changed)}; files are missing: {sorted(missing)}"
        )
    check_nothing_left(run_dir)


def check_nothing_left(run_dir: Path) -> None:
    """Checks that a finished run has left nothing behind.

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


def _check_rows(source: str, rows: tuple[Row, ...], expected: tuple[Row, ...]) -> None:
    if rows == expected:
        return
    for number, (row, other) in enumerate(zip(rows, expected, strict=False), 1):
        if row != other:
            raise LostMemberError(f"{source}: row {number} is {row}, undisturbed {other}")
    raise LostMemberError(f"{source}: {len(rows)} rows, undisturbed {len(expected)}")


def _decisions(run_dir: Path) -> tuple[tuple[Row, ...], dict[int, Row]]:
    """Returns the decisions that stand, and those taken back, by attempt."""
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
    digests = {}
    state = run_dir / "state"
    for path in sorted((*state.glob("step-*/*.safetensors"), *state.glob(f"{BASE}/*"))):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[str(path.relative_to(run_dir))] = digest
    return digests
