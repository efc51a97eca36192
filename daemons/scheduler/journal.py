"""The journal: the truth about commits, in SQLite (``RUN_DIR/journal.sqlite``).

Tables::

    meta         key, value                    format and run id
    epochs       epoch, next_attempt, pids     a row before any message of the epoch
    decisions    seq, epoch, record, position  a row before any message about the decision;
                                               the position's object has the row's checksum
    evaluations  evaluation, version           a row per finished evaluation
    metrics      seq, line                     the lines of metrics.jsonl, in the same transaction

WAL with ``synchronous=FULL``: a row is on disk when the call returns. A process that is killed in
the middle of a write leaves a log whose unfinished end SQLite ignores.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.daemons.scheduler.machine.events import (
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
)
from penstock.daemons.scheduler.machine.mirror import JournalFacts
from penstock.daemons.scheduler.machine.position import Position
from penstock.protocol.errors import PenstockError, StateError
from penstock.protocol.run.files import no_room
from penstock.protocol.run.seal import CHECKSUM, check_object, with_checksum
from penstock.shm.control import RECORD_FIELDS, CommitRecord, Decision

FORMAT = "1"
BUSY_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)
_MAX_COUNT = 2**31
_ADVICE = "put an intact copy there, or move it away: then the newest saved state counts"
ROOM_BYTES = 64 << 10
"""What a journal should have room for at any time: its log's index, and some rows."""
_FAILED_WRITES = frozenset(
    (
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_SHMMAP,
    )
)
"""What SQLite says of full disks where it does not say so, and of quotas."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (
    epoch INTEGER PRIMARY KEY, next_attempt INTEGER NOT NULL, pids TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS decisions (
    seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, {record}, position TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (
    evaluation INTEGER PRIMARY KEY, version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS metrics (seq INTEGER PRIMARY KEY, line TEXT NOT NULL);
"""
_RECORD_COLUMNS = ", ".join(RECORD_FIELDS)
_COLUMN_TYPES = {int: "INTEGER NOT NULL", float: "REAL NOT NULL"}


class Journal:
    """An open journal. Used by one thread."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Open or create.

        Raises:
            CapacityError: its disk has no room for it.
            StateError: the file is no journal of this run, or damaged; nothing was changed.
        """
        self.path = path
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._explained("cannot be opened as a journal", error) from error
        try:
            # FULL: COMMIT returns when the log is on disk. With NORMAL, the default of many, a
            # power cut could undo a decision that was announced.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.executescript(_schema())
            self._identify(run_id)
        except sqlite3.DatabaseError as error:
            self.close()
            raise self._explained("cannot be read as a journal", error) from error
        except PenstockError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def load(self) -> JournalFacts:
        """Returns everything a starting scheduler needs.

        Raises:
            StateError: a row makes no sense.
        """
        try:
            return self._load()
        except sqlite3.Error as error:
            raise self._explained("cannot be read as a journal", error) from error
        except (ValueError, OverflowError, TypeError, RecursionError) as error:
            raise StateError(f"{self.path}: damaged: {error!r}; {_ADVICE}") from error

    def begin_epoch(self, effect: JournalEpoch) -> None:
        """Write an epoch's number; it is durable when this returns.

        Raises:
            CapacityError, StateError: it cannot be written; nothing of it was. So for all rows.
        """
        with self._transaction():
            self._connection.execute(
                "INSERT INTO epochs VALUES (?, ?, ?)",
                (effect.epoch, effect.next_attempt, json.dumps(effect.pids)),
            )

    def decide(self, effect: JournalDecision) -> None:
        """Write a decision; only when this returns it is durable, and anyone may hear of it."""
        record = effect.record
        with self._transaction():
            self._connection.execute(
                f"INSERT INTO decisions (epoch, position, {_RECORD_COLUMNS})"
                f" VALUES (?, ?{', ?' * len(RECORD_FIELDS)})",
                (
                    effect.epoch,
                    json.dumps(_sealed(effect.epoch, effect.position, record)),
                    *record.values,
                ),
            )
            self._append_line(effect.metrics_json)

    def evaluate(self, effect: JournalEvaluation) -> None:
        """Write that an evaluation is done; it is durable when this returns."""
        with self._transaction():
            self._connection.execute(
                "INSERT INTO evaluations VALUES (?, ?)", (effect.evaluation, effect.version)
            )
            self._append_line(effect.metrics_json)

    def newest_line(self, phase: str) -> str:
        """Returns the last metrics line of a phase, ``train`` or ``eval``; empty without one.

        Raises:
            StateError: the journal cannot be read.
        """
        query = "SELECT line FROM metrics WHERE line LIKE ? ORDER BY seq DESC LIMIT 1"
        try:
            found = self._connection.execute(query, (f'%"phase": "{phase}"%',)).fetchone()
        except sqlite3.Error as error:
            raise self._explained("cannot be read", error) from error
        return found[0] if found else ""

    def lines_after(self, line: str) -> list[str] | None:
        """Returns the metrics lines newer than ``line`` (all if it is empty); None: it is unknown.

        Raises:
            StateError: the journal cannot be read.
        """
        try:
            return self._lines_after(line)
        except sqlite3.Error as error:
            raise self._explained("cannot be read", error) from error

    def _lines_after(self, line: str) -> list[str] | None:
        seq = 0
        if line:
            row = self._connection.execute(
                "SELECT seq FROM metrics WHERE line = ? ORDER BY seq DESC LIMIT 1", (line,)
            ).fetchone()
            if row is None:
                return None
            seq = row[0]
        query = "SELECT line FROM metrics WHERE seq > ? ORDER BY seq"
        return [text for (text,) in self._connection.execute(query, (seq,))]

    def _identify(self, run_id: str) -> None:
        expected = {"format": FORMAT, "run_id": run_id}
        found = dict(self._connection.execute("SELECT key, value FROM meta"))
        if not found:
            with self._transaction():
                self._connection.executemany("INSERT INTO meta VALUES (?, ?)", expected.items())
            return
        for key, value in expected.items():
            if found.get(key) != value:
                raise StateError(f"{self.path}: {key} is {found.get(key)!r}, expected {value!r}")

    def _load(self) -> JournalFacts:
        execute = self._connection.execute
        epoch = execute("SELECT * FROM epochs ORDER BY epoch DESC LIMIT 1").fetchone()
        columns = f"epoch, position, {_RECORD_COLUMNS}"
        last = execute(f"SELECT {columns} FROM decisions ORDER BY seq DESC LIMIT 1").fetchone()
        committed = execute(
            f"SELECT {columns} FROM decisions WHERE decision != ? ORDER BY seq DESC LIMIT 1",
            (int(Decision.SKIP),),
        ).fetchone()
        evaluation = execute(
            "SELECT evaluation, version FROM evaluations ORDER BY evaluation DESC LIMIT 1"
        ).fetchone() or (0, 0)
        line = execute("SELECT line FROM metrics ORDER BY seq DESC LIMIT 1").fetchone()
        record = self._decision(committed)[0] if committed is not None else None
        decided, position = self._decision(last) if last is not None else (None, None)
        first = epoch[1] if epoch is not None else 1
        # One attempt may have been under way, known to members, when the scheduler died.
        next_attempt = max(first, decided.attempt + 1 if decided is not None else 1) + (
            epoch is not None
        )
        _check_counts(epoch, next_attempt, evaluation)
        return JournalFacts(
            epoch=epoch[0] if epoch is not None else 0,
            next_attempt=next_attempt,
            record=record,
            position=position,
            pids=tuple((n, p) for n, p in json.loads(epoch[2])) if epoch is not None else (),
            evaluation=evaluation[0],
            evaluated=min(evaluation[1], record.version if record is not None else 0),
            last_metrics_json=line[0] if line is not None else "",
        )

    def _decision(self, row: tuple[Any, ...]) -> tuple[CommitRecord, Position]:
        """Record and position of a row, held against the checksum that is stored with them."""
        epoch, text, *columns = row
        record = CommitRecord.of(columns)
        fields = json.loads(text)
        source = f"{self.path}: decision about attempt {record.attempt}"
        position = Position.from_fields(fields, source)
        sealed = {**fields, **_beside(epoch, record)}
        if not check_object(sealed, source):
            _log.warning("%s has no checksum (of an older Penstock): it is taken as it is", source)
        return record, position

    def _append_line(self, line: str) -> None:
        if line:
            self._connection.execute("INSERT INTO metrics (line) VALUES (?)", (line,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            # IMMEDIATE takes the write lock now: a second scheduler fails here, not at its COMMIT.
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:  # some failures have rolled it back already
                self._connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._explained("cannot be written", error) from error
            raise

    def _explained(self, what: str, error: sqlite3.Error) -> PenstockError:
        """Returns the error to raise: SQLite has many codes for what a full disk does to it."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code == sqlite3.SQLITE_FULL or code in _FAILED_WRITES:
            return no_room(self.path, ROOM_BYTES)
        if not self.path.is_file():
            return StateError(f"{self.path}: is no file; move away what is there")
        return StateError(f"{self.path}: {what}: {error}; {_ADVICE}")


def _check_counts(epoch: Any, next_attempt: Any, evaluation: Any) -> None:
    """Epochs and attempts share a word of 64 bits, and grow.

    Raises:
        ValueError: one is out of range.
    """
    numbers = [next_attempt, *evaluation, *(epoch[:2] if epoch is not None else ())]
    for number in numbers:
        if type(number) is not int or not 0 <= number < _MAX_COUNT:
            raise ValueError(f"{number!r} is no number of an epoch, attempt or evaluation")


def _sealed(epoch: int, position: Position, record: CommitRecord) -> dict[str, Any]:
    """Returns the position as it is stored: with a checksum over the whole row."""
    fields = position.to_fields()
    whole = with_checksum({**fields, **_beside(epoch, record)})
    return {**fields, CHECKSUM: whole[CHECKSUM]}


def _beside(epoch: int, record: CommitRecord) -> dict[str, Any]:
    """Returns what a row holds beside the position, as its checksum counts it: whole numbers first,
    then fractions, bit for bit.
    """
    kinds = RECORD_FIELDS.values()
    whole = [value for value, kind in zip(record.values, kinds, strict=True) if kind is int]
    floats = [value for value, kind in zip(record.values, kinds, strict=True) if kind is float]
    return {"epoch": epoch, "record": [*whole, *(float(value).hex() for value in floats)]}


def _schema() -> str:
    columns = (f"{name} {_COLUMN_TYPES[kind]}" for name, kind in RECORD_FIELDS.items())
    return _SCHEMA.format(record=", ".join(columns))
