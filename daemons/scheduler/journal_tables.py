"""The tables of a journal, and the number of its transactions.

The number is in a file (``RUN_DIR/journal.sqlite-count``). SQLite opens a database without its log,
or with an empty or older one, and reports no error. The transactions in the lost log are gone. So
the journal counts its transactions, and writes each count to this file after the transaction is
durable. The file has a higher count only if the journal lost rows. The file is not forced to disk:
after a power cut it may have an older count, or none, and then fewer losses are detected.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.host.errors import StateError
from penstock.host.files import cannot_write, writing
from penstock.shm.control import RECORD_FIELDS

TRANSACTIONS = "transactions"
"""The key of the count in the journal's table ``meta``."""
_BYTES = 20
"""The size of the file: a later count overwrites the digits of an earlier one in place."""
_log = logging.getLogger(__name__)
_MAX_COUNT = 2**31

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER PRIMARY KEY, next_attempt INTEGER NOT NULL, pids TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS decisions (
    seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, {record}, position TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (
    evaluation INTEGER PRIMARY KEY, version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS scores (
    set_name TEXT NOT NULL, version INTEGER NOT NULL, loss REAL, token_accuracy REAL,
    PRIMARY KEY (set_name, version));
CREATE TABLE IF NOT EXISTS generations (
    member TEXT NOT NULL, incarnation INTEGER NOT NULL, generation INTEGER NOT NULL,
    epoch INTEGER NOT NULL, PRIMARY KEY (member, incarnation, generation));
CREATE TABLE IF NOT EXISTS tokens (
    member TEXT NOT NULL, incarnation INTEGER NOT NULL, tokens TEXT NOT NULL,
    PRIMARY KEY (member, incarnation));
CREATE TABLE IF NOT EXISTS numerics (
    step INTEGER PRIMARY KEY, digest TEXT NOT NULL, json TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS metrics (seq INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS metrics_by_phase ON metrics ({phase}, seq);
"""
PHASE = "json_extract(line, '$.phase')"
"""The index over the phase. An evaluation may be a million lines back; a start must not read
all.
"""
_COLUMN_TYPES = {int: "INTEGER NOT NULL", float: "REAL NOT NULL"}


class JournalCount:
    """The file, open while its journal is open. Used by one thread."""

    def __init__(self, journal: Path) -> None:
        """Opens or creates the file next to ``journal``.

        Raises:
            CapacityError: the disk has no room for the file.
            ConfigError: the file cannot be written for another reason.
        """
        self._path = journal.with_name(f"{journal.name}-count")
        self._complained = False
        with writing(self._path, _BYTES):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)

    def read(self) -> int:
        """Returns the transactions that the journal has at least; 0 where the file is damaged."""
        with writing(self._path, _BYTES):
            text = os.pread(self._descriptor, _BYTES, 0).strip()
        return int(text) if re.fullmatch(rb"[0-9]{1,18}", text) else 0

    def write(self, count: int) -> None:
        """Writes the count of a durable transaction; logs the first failure."""
        try:
            os.pwrite(self._descriptor, str(count).ljust(_BYTES - 1).encode() + b"\n", 0)
        except OSError as error:
            if not self._complained:
                complaint = cannot_write(self._path, error, _BYTES)
                _log.warning("%s; a loss of rows may not be found", complaint)
            self._complained = True

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def transactions_of(meta: dict[str, str], journal: Path) -> int:
    """Returns the transactions that a journal counted; 0 for the journal of an older Penstock.

    Raises:
        StateError: the count is damaged.
    """
    text = meta.get(TRANSACTIONS, "0")
    if not re.fullmatch("[0-9]{1,18}", text):
        raise StateError(f"{journal}: damaged: {text[:40]!r} is no count of transactions")
    return int(text)


def refuse_lone_log(journal: Path) -> None:
    """Rejects a log without its database, or with an empty one: SQLite would remove the log.

    Raises:
        StateError: names both files.
    """
    log = journal.with_name(f"{journal.name}-wal")
    if _size(log) and not _size(journal):
        raise lost_rows(journal, f"is missing or empty next to {log.name}")


def _size(path: Path) -> int:
    """Returns the size of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def last_step(journal: Path) -> int:
    """Returns the step of the last whole line of metrics.jsonl; 0 without a line."""
    try:
        lines = journal.with_name("metrics.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return 0
    return step_of(lines[-2].decode(errors="replace")) if len(lines) > 1 else 0


def step_of(line: str) -> int:
    """Returns the step that a line of metrics is about; 0 for a line of another program."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0
    return step if type(step) is int else 0


def lost_rows(journal: Path, finding: str) -> StateError:
    """Returns the error about a journal that lost rows: what was found, and what helps."""
    return StateError(
        f"{journal}: {finding}: rows are lost, as when it was copied, or restored, without"
        f" {journal.name}-wal; put both files there as they were, or, to go on from the newest"
        f" saved state, move {journal.name} and {journal.name}-wal away"
    )


def check_counts(epoch: Any, next_attempt: Any, evaluation: Any) -> None:
    """Checks the numbers of epoch, attempt and evaluation. Epoch and attempt share 64 bits.

    Raises:
        ValueError: a number is out of range.
    """
    numbers = [next_attempt, *evaluation, *(epoch[:2] if epoch is not None else ())]
    for number in numbers:
        if type(number) is not int or not 0 <= number < _MAX_COUNT:
            raise ValueError(f"{number!r} is no number of an epoch, attempt or evaluation")


def score_of(set_name: Any, version: Any, loss: Any, token_accuracy: Any) -> Score:
    """Returns the score of a row.

    Raises:
        ValueError: a value has another type or range.
    """
    means = [value for value in (loss, token_accuracy) if value is not None]
    finite = all(type(value) is float and math.isfinite(value) for value in means)
    if type(set_name) is not str or type(version) is not int or not finite:
        raise ValueError(f"no evaluation: {set_name!r} {version!r} {loss!r} {token_accuracy!r}")
    if not 0 <= version < _MAX_COUNT:
        raise ValueError(f"{version!r} is no step of an evaluation")
    return Score(set_name=set_name, version=version, loss=loss, accuracy=token_accuracy)


def schema() -> str:
    """Returns the SQL that makes the missing tables."""
    columns = (f"{name} {_COLUMN_TYPES[kind]}" for name, kind in RECORD_FIELDS.items())
    return _SCHEMA.format(record=", ".join(columns), phase=PHASE)
