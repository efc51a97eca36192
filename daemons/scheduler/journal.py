"""The journal in SQLite (``RUN_DIR/journal.sqlite``): the truth about commits.

Tables::

    meta         key, value                    format, run id; the number of transactions; the last
                                               line of a metrics.jsonl older than the journal
    epochs       epoch, next_attempt, pids     a row before any message of the epoch
    decisions    seq, epoch, record, position  a row before any message about the decision;
                                               the position's object has the row's checksum
    evaluations  evaluation, version           a row per finished evaluation
    scores       set_name, version, means      results of evaluations of the committed history:
                                               a restore removes rows of later versions
    generations  member, incarnation, generation, epoch
                                               a row before memory is filled from a partner
    tokens       member, incarnation, tokens   a row before segments are filled or used; a reader
                                               could forge segments, so the file is private
    numerics     step, digest, json            a row before workers begin: recipe and devices from
                                               that step on
    metrics      seq, line                     the lines of metrics.jsonl, in the same transaction

WAL with ``synchronous=FULL``: a row is on disk when the call returns. A kill in the middle of a
write may leave an unfinished end of the log, which SQLite ignores. It may also leave a complete row
that is not on disk: the next process that opens the file forces the row to disk.

Each transaction counts itself in ``meta``, and then in a separate file. A journal with fewer
transactions than that file has lost its log, and is rejected
(:mod:`penstock.daemons.scheduler.journal_tables`). Each log therefore holds the page with the run
id, by which the log of another run is rejected.

The journal is open in exclusive mode. The lock is held while the file is open, so a second
scheduler of the run is rejected. The log then needs no memory shared between processes, which no
network file system has (https://www.sqlite.org/wal.html, "Use of WAL Without Shared-Memory"). File
systems without locks are rejected (:mod:`penstock.daemons.scheduler.file_system`). The kernel frees
the lock when its holder dies. A file server does so when the holder's machine is silent for its
lease.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.config.evaluation import EVAL
from penstock.daemons.scheduler.file_system import Locks, check_locks
from penstock.daemons.scheduler.journal_tables import (
    PHASE,
    TRANSACTIONS,
    JournalCount,
    check_counts,
    last_step,
    lost_rows,
    refuse_lone_log,
    schema,
    score_of,
    step_of,
    transactions_of,
)
from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.daemons.scheduler.machine.events import (
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    JournalGenerations,
    JournalNumerics,
    JournalTokens,
)
from penstock.daemons.scheduler.machine.mirror import JournalFacts
from penstock.daemons.scheduler.machine.position import Position
from penstock.host import world
from penstock.host.errors import PenstockError, StateError
from penstock.host.files import DAMAGED, no_room
from penstock.host.trust import FOR_OTHERS, objection, owners_in
from penstock.protocol.run.checksums import CHECKSUM, check_object, with_checksum
from penstock.shm.control import RECORD_FIELDS, CommitRecord, Decision

FORMAT = "1"
BUSY_TIMEOUT_S = 1.0
"""Seconds to wait for the locks of a killed process."""
NETWORK_BUSY_TIMEOUT_S = 120.0
"""Seconds to wait for the locks of a dead machine; the lease of NFS is 90 s by default."""
_log = logging.getLogger(__name__)
_ADVICE = "put an intact copy there, or move it away: then the newest saved state counts"
_BESIDE = "metrics_before"
_SET_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
ROOM_BYTES = 64 << 10
"""Bytes that a journal needs free at any time, for its log's index and some rows."""
_FAILED_WRITES = frozenset(
    (
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_SHMMAP,
    )
)
"""SQLite's codes for full disks and quotas, other than SQLITE_FULL."""

_PRIMARY = 0xFF
"""Mask of the primary code in an extended code of SQLite."""

_RECORD_COLUMNS = ", ".join(RECORD_FIELDS)


_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""Errors of SQLite about a damaged file. Some messages quote the damage, and cannot be decoded."""


class JournalInUseError(StateError):
    """Another scheduler has the journal, so the run and its members belong to that scheduler."""


class Journal:
    """An open journal. Used by one thread."""

    def __init__(self, path: Path, run_id: str) -> None:
        """Opens or creates the journal.

        Raises:
            CapacityError: the disk has no room for the journal.
            ConfigError: the file system has no locks.
            JournalInUseError: another scheduler has the journal open.
            StateError: the file is no journal of this run, or damaged; no file was changed.
        """
        self.path = path
        self._file: tuple[int, int] | None = None
        self._count: JournalCount | None = None
        self._transactions = 0
        timeout_s = BUSY_TIMEOUT_S
        if check_locks(path) is Locks.OF_A_SERVER:
            timeout_s = NETWORK_BUSY_TIMEOUT_S
        refuse_lone_log(path)
        existed = path.exists()
        _keep_private(path)
        try:
            self._connection = world.database(path, timeout_s=timeout_s)
        except sqlite3.Error as error:
            raise self._explained("cannot be opened as a journal", error) from error
        try:
            self._take_hold(run_id, existed=existed)
        except _UNREADABLE as error:
            self.close()
            raise self._explained("cannot be read as a journal", error) from error
        except BaseException:
            self.close()  # its lock would reject the next process
            raise
        self._file = _identity(path)

    def _take_hold(self, run_id: str, *, existed: bool) -> None:
        # Before anything reads: only then the log's index is kept in this process's memory.
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        # FULL: COMMIT returns when the log is on disk. With NORMAL, the default of many, a power
        # cut could undo a decision that was announced.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("BEGIN IMMEDIATE")  # the lock, which stays
        self._connection.execute("COMMIT")
        self._count = JournalCount(self.path)
        expected = {"format": FORMAT, "run_id": run_id}
        meta = self._identify(expected)
        self._transactions = transactions_of(meta, self.path)
        if existed:
            self._refuse_loss(self._count.read(), has_begun=bool(meta))
        # A scheduler that was killed in a COMMIT may have left a row that is not on disk yet. The
        # row counts for each reader, so no power cut may undo it: this forces the log to disk.
        self._checkpoint()
        is_older = bool(meta) and not self._has_table("scores")
        self._connection.executescript(schema())
        if is_older:
            self._take_scores()
        if not meta:
            self._count.write(0)  # the file may have the count of a journal that was moved away
            with self._transaction():
                self._connection.executemany(_SET_META, expected.items())
            # Without its log, this file must differ from a journal that has just begun.
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Forces the log to disk, and its rows into the file."""
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Closes the files."""
        self._connection.close()
        if self._count is not None:
            self._count.close()
            self._count = None

    def load(self) -> JournalFacts:
        """Returns the content for a starting scheduler.

        Raises:
            StateError: a row is damaged.
        """
        try:
            return self._load()
        except _UNREADABLE as error:
            raise self._explained("cannot be read as a journal", error) from error
        except (*DAMAGED, RecursionError) as error:
            raise StateError(f"{self.path}: damaged: {error!r}; {_ADVICE}") from error

    def begin_epoch(self, effect: JournalEpoch) -> None:
        """Writes an epoch's number. Each row is durable when its method returns.

        Raises:
            CapacityError, StateError: the row cannot be written, and no part of it was. All methods
                that write raise these.
        """
        with self._transaction():
            self._connection.execute(
                "INSERT INTO epochs VALUES (?, ?, ?)",
                (effect.epoch, effect.next_attempt, json.dumps(effect.pids)),
            )

    def decide(self, effect: JournalDecision) -> None:
        """Writes a decision. Members may learn it after the return: only then the row is
        durable.
        """
        with self._transaction():
            self._insert_decision(effect.epoch, effect.position, effect.record)
            if effect.record.decision is Decision.RESTORE:
                self._forget_scores(effect.record.version)
            self._append_line(effect.metrics_json)

    def evaluate(self, effect: JournalEvaluation) -> None:
        """Writes a finished evaluation."""
        with self._transaction():
            score = effect.score
            self._connection.execute(
                "INSERT INTO evaluations VALUES (?, ?)", (effect.evaluation, score.version)
            )
            self._connection.execute(
                "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?)",
                (score.set_name, score.version, score.loss, score.accuracy),
            )
            self._append_line(effect.metrics_json)

    def go_back(self, position: Position, attempt: int, incarnation: int) -> None:
        """Removes, in one transaction, all rows after ``attempt``, which led to ``position``.

        The new ``incarnation`` makes all memory void, so the next start fills it. Numbers of epochs
        and attempts go on.

        Raises:
            CapacityError, StateError: the journal cannot be written, and no row was changed.
        """
        facts = self.load()
        record = CommitRecord.of_restore(
            position.version, incarnation, attempt=max(attempt, facts.next_attempt - 1)
        )
        with self._transaction():
            execute = self._connection.execute
            execute("DELETE FROM decisions WHERE attempt > ?", (attempt,))
            execute("DELETE FROM evaluations WHERE version > ?", (position.version,))
            self._forget_scores(position.version)
            execute("DELETE FROM numerics WHERE step > ?", (position.version,))
            execute("DELETE FROM metrics WHERE json_extract(line, '$.attempt') > ?", (attempt,))
            self._insert_decision(facts.epoch, position, record)

    def check_beside(self, line: str) -> None:
        """Compares the last line of ``metrics.jsonl`` with the journal, which had each line first.

        Raises:
            StateError: the journal does not know the line's step, so rows are lost.
        """
        before = self._first("SELECT value FROM meta WHERE key = ?", _BESIDE)
        facts = self.load()
        if before is None and facts.position is None:
            if step_of(line):
                _log.warning(
                    "%s: is new, and metrics.jsonl ends at step %d: the newest saved state counts",
                    self.path,
                    step_of(line),
                )
            with self._transaction():
                self._connection.execute(_SET_META, (_BESIDE, line))
            self._checkpoint()
            return
        step, version = step_of(line), 0 if facts.record is None else facts.record.version
        known = not line or (before is not None and before[0] == line)
        if known or step <= version or self.lines_after(line) is not None:
            return
        raise lost_rows(self.path, _behind(version, step))

    def replace(self, effect: JournalGenerations) -> None:
        """Writes new generations of memory."""
        rows = [
            (name, effect.incarnation, generation, effect.epoch)
            for name, generation in effect.generations
        ]
        with self._transaction():
            self._connection.executemany("INSERT INTO generations VALUES (?, ?, ?, ?)", rows)

    def recognise(self, effect: JournalTokens) -> None:
        """Writes the tokens of segments."""
        rows = [(name, effect.incarnation, tokens) for name, tokens in effect.tokens]
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", rows)

    def follow(self, effect: JournalNumerics) -> None:
        """Writes the recipe that holds from a step on, and removes rows of later steps."""
        fields = {"recipe": json.loads(effect.recipe), "devices": effect.devices}
        text = json.dumps(fields, sort_keys=True)
        with self._transaction():
            self._connection.execute("DELETE FROM numerics WHERE step >= ?", (effect.step,))
            row = (effect.step, effect.digest, text)
            self._connection.execute("INSERT INTO numerics VALUES (?, ?, ?)", row)

    def newest_line(self, phase: str) -> str:
        """Returns the last metrics line of a phase, ``train`` or ``eval``; empty without one.

        Raises:
            StateError: the journal cannot be read.
        """
        query = f"SELECT line FROM metrics WHERE {PHASE} = ? ORDER BY seq DESC LIMIT 1"
        row = self._first(query, phase)
        return row[0] if row else ""

    def lines_after(self, line: str) -> list[str] | None:
        """Returns the metrics lines after ``line`` (all if empty); None if it is unknown.

        Raises:
            StateError: the journal cannot be read.
        """
        try:
            return self._lines_after(line)
        except _UNREADABLE as error:
            raise self._explained("cannot be read", error) from error

    def _first(self, query: str, value: str) -> Any:
        """Returns the first row of a query with ``value``, or None.

        Raises:
            StateError: the journal cannot be read.
        """
        try:
            return self._connection.execute(query, (value,)).fetchone()
        except _UNREADABLE as error:
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

    def _identify(self, expected: dict[str, str]) -> dict[str, str]:
        """Returns the content of ``meta``; empty in a journal that has not begun.

        Raises:
            StateError: the journal belongs to another run.
        """
        if not self._has_table("meta"):
            return {}
        meta = dict(self._connection.execute("SELECT key, value FROM meta"))
        for key, value in expected.items() if meta else ():
            if meta.get(key) != value:
                raise StateError(
                    f"{self.path}: {key} is {meta.get(key)!r}, expected {value!r}: it is another"
                    f" run's, or another Penstock's; {_ADVICE}"
                )
        return meta

    def _has_table(self, name: str) -> bool:
        query = "SELECT name FROM sqlite_schema WHERE name = ?"
        return self._connection.execute(query, (name,)).fetchone() is not None

    def _refuse_loss(self, counted: int, *, has_begun: bool) -> None:
        """Compares an existing journal with the count in its separate file. A journal that has not
        begun is compared with the metrics as well: an older Penstock may have written them.

        Raises:
            StateError: the journal lost rows.
        """
        if has_begun and self._transactions >= counted:
            return
        step = last_step(self.path)
        if self._transactions >= counted and not step:
            return
        record = self.load().record if has_begun else None
        version = 0 if record is None else record.version
        if step > version:
            raise lost_rows(self.path, _behind(version, step))
        raise lost_rows(self.path, f"has {self._transactions} transactions of {counted}")

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
        check_counts(epoch, next_attempt, evaluation)
        return JournalFacts(
            epoch=epoch[0] if epoch is not None else 0,
            next_attempt=next_attempt,
            record=record,
            position=position,
            pids=tuple((n, p) for n, p in json.loads(epoch[2])) if epoch is not None else (),
            evaluation=evaluation[0],
            scores=self._scores(),
            last_metrics_json=line[0] if line is not None else "",
            generations=self._generations(record),
            tokens=self._tokens(record),
            numerics=self._numerics(),
        )

    def _scores(self) -> tuple[Score, ...]:
        columns = "set_name, version, loss, token_accuracy"
        query = f"SELECT {columns} FROM scores ORDER BY set_name, version"
        return tuple(score_of(*row) for row in self._connection.execute(query))

    def _forget_scores(self, version: int) -> None:
        """Removes evaluations that the run goes back from, inside a transaction."""
        self._connection.execute("DELETE FROM scores WHERE version > ?", (version,))

    def _take_scores(self) -> None:
        """Fills the table of a journal of an older Penstock from its lines of metrics."""
        step, loss = (f"json_extract(line, '$.{key}')" for key in ("step", "loss"))
        committed = "(SELECT version FROM decisions ORDER BY seq DESC LIMIT 1)"
        with self._transaction():
            self._connection.execute(
                f"INSERT OR REPLACE INTO scores SELECT ?, {step}, {loss}, NULL FROM metrics"
                f" WHERE {PHASE} = 'eval' AND {step} <= {committed} ORDER BY seq",
                (EVAL,),
            )

    def _generations(self, record: CommitRecord | None) -> tuple[tuple[str, int], ...]:
        if record is None:
            return ()
        query = "SELECT member, MAX(generation) FROM generations WHERE incarnation = ? GROUP BY 1"
        rows = self._connection.execute(query, (record.incarnation,)).fetchall()
        return tuple((str(member), int(generation)) for member, generation in rows)

    def _tokens(self, record: CommitRecord | None) -> tuple[tuple[str, str], ...]:
        if record is None:
            return ()
        query = "SELECT member, tokens FROM tokens WHERE incarnation = ?"
        rows = self._connection.execute(query, (record.incarnation,)).fetchall()
        return tuple((str(member), str(tokens)) for member, tokens in rows)

    def _numerics(self) -> JournalNumerics | None:
        query = "SELECT step, digest, json FROM numerics ORDER BY step DESC LIMIT 1"
        row = self._connection.execute(query).fetchone()
        if row is None:
            return None
        fields = json.loads(row[2])
        devices = {
            str(name): {str(key): str(value) for key, value in facts.items()}
            for name, facts in fields["devices"].items()
        }
        recipe = json.dumps(fields["recipe"], sort_keys=True, separators=(",", ":"))
        return JournalNumerics(step=int(row[0]), digest=str(row[1]), recipe=recipe, devices=devices)

    def _decision(self, row: tuple[Any, ...]) -> tuple[CommitRecord, Position]:
        """Returns record and position of a row, after a check of the stored checksum."""
        epoch, text, *columns = row
        record = CommitRecord.of(columns)
        fields = json.loads(text)
        source = f"{self.path}: decision about attempt {record.attempt}"
        position = Position.from_fields(fields, source)
        fields_to_check = {**fields, **_beside(epoch, record)}
        if not check_object(fields_to_check, source):
            _log.warning("%s has no checksum (of an older Penstock): it is taken as it is", source)
        return record, position

    def _insert_decision(self, epoch: int, position: Position, record: CommitRecord) -> None:
        self._connection.execute(
            f"INSERT INTO decisions (epoch, position, {_RECORD_COLUMNS})"
            f" VALUES (?, ?{', ?' * len(RECORD_FIELDS)})",
            (epoch, json.dumps(_with_checksum(epoch, position, record)), *record.values),
        )

    def _append_line(self, line: str) -> None:
        if line:
            self._connection.execute("INSERT INTO metrics (line) VALUES (?)", (line,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._must_be_in_place()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            count = self._transactions + 1
            self._connection.execute(_SET_META, (TRANSACTIONS, str(count)))
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:  # some failures have rolled it back already
                self._connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._explained("cannot be written", error) from error
            raise
        self._must_be_in_place()  # before a member learns of a row in a replaced file
        self._transactions = count
        if self._count is not None:
            self._count.write(count)

    def _must_be_in_place(self) -> None:
        if self._file is not None and _identity(self.path) != self._file:
            raise StateError(
                f"{self.path}: is not the file any more that this scheduler writes to: it was moved"
                " or replaced while the run goes on; put it back"
            )

    def _explained(self, what: str, error: Exception) -> PenstockError:
        """Returns the error to raise: SQLite has many codes for a full disk."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code == sqlite3.SQLITE_FULL or code in _FAILED_WRITES:
            return no_room(self.path, ROOM_BYTES)
        if code & _PRIMARY == sqlite3.SQLITE_BUSY:
            return JournalInUseError(
                f"{self.path}: another scheduler of this run has it open, here or on a machine that"
                " shares the folder: stop that one first (penstock stop), or wait until its process"
                " is gone; a file server may keep the lock of a dead machine for some minutes"
            )
        if not self.path.is_file():
            return StateError(f"{self.path}: is no file; move away what is there")
        return StateError(f"{self.path}: {what}: {error}; {_ADVICE}")


def _keep_private(path: Path) -> None:
    """Makes the journal's file readable to this user only: its tokens would allow to forge shared
    memory. A missing file is created. An existing one is never opened: to close it would drop this
    process's locks on it (https://www.sqlite.org/howtocorrupt.html, section 2.2).

    Raises:
        StateError: the path is not a file of this user.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return
    except FileExistsError:
        pass
    except OSError:
        return  # SQLite reports the reason
    status = os.lstat(path)
    reason = objection(status, owners_in(path.parent), forbidden=stat.S_IWOTH)
    if reason and not stat.S_ISDIR(status.st_mode):  # SQLite reports a folder itself
        raise StateError(f"{path} {reason}, so it is not believed as a journal; {_ADVICE}")
    for name in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):  # no log there, or a file system without modes
            if os.lstat(name).st_mode & FOR_OTHERS and name.is_file():
                name.chmod(0o600)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns device and inode; None when there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _behind(version: int, step: int) -> str:
    """Returns the finding about a journal that ends before metrics.jsonl."""
    return f"ends at step {version}, metrics.jsonl next to it at step {step}"


def _with_checksum(epoch: int, position: Position, record: CommitRecord) -> dict[str, Any]:
    """Returns the position as it is stored: with a checksum over the whole row."""
    fields = position.to_fields()
    whole = with_checksum({**fields, **_beside(epoch, record)})
    return {**fields, CHECKSUM: whole[CHECKSUM]}


def _beside(epoch: int, record: CommitRecord) -> dict[str, Any]:
    """Returns the rest of a row for its checksum: whole numbers, then the bits of fractions."""
    kinds = RECORD_FIELDS.values()
    whole = [value for value, kind in zip(record.values, kinds, strict=True) if kind is int]
    floats = [value for value, kind in zip(record.values, kinds, strict=True) if kind is float]
    return {"epoch": epoch, "record": [*whole, *(float(value).hex() for value in floats)]}
