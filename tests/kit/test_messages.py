"""A commit record in its three forms, field by field, and the messages that all members know."""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from contextlib import closing
from pathlib import Path

from penstock.daemons.kit.events import SendDrained, SendFailed, SendReady, ShutdownAsked
from penstock.daemons.kit.messages import (
    COMMON_EVENTS,
    answer,
    event_of,
    record_message,
    record_of,
)
from penstock.daemons.scheduler.journal import Journal
from penstock.daemons.scheduler.machine.events import JournalDecision
from penstock.daemons.scheduler.machine.position import Position
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord, Decision

RECORD = CommitRecord(
    version=12,
    attempt=15,
    decision=Decision.AMEND,
    coefficient=0.1,
    inverse_loss_scale=2.0**-16,
    learning_rate=3e-4,
    bias_step=11,
    incarnation=2**63 - 1,
)
CHECKSUM = "9e11cf0b436bc2d2bdff5c1787339a437ccca7143ff63963310c7efcf37a67f7"
TABLE_INFO = "PRAGMA table_info(decisions)"


def test_the_words_of_a_record() -> None:
    words = (12, 15, 2, 0.1, 2.0**-16, 3e-4, 11, 2**63 - 1)
    payload = struct.pack("<QQQdddQQ", *words)
    assert RECORD.pack() == payload + struct.pack("<Q", zlib.crc32(payload))
    assert CommitRecord.unpack(RECORD.pack()) == RECORD


def test_a_checksum_over_no_decision_is_no_record() -> None:
    payload = struct.pack("<QQQdddQQ", 12, 15, 9, 0.1, 2.0**-16, 3e-4, 11, 7)
    assert CommitRecord.unpack(payload + struct.pack("<Q", zlib.crc32(payload))) is None


def test_a_record_as_a_message() -> None:
    message = pb.Record(
        version=12,
        attempt=15,
        decision=2,
        coefficient=0.1,
        inverse_loss_scale=2.0**-16,
        learning_rate=3e-4,
        bias_step=11,
        incarnation=2**63 - 1,
    )
    assert record_message(RECORD) == message
    assert record_of(message) == RECORD


def test_a_record_as_a_row(tmp_path: Path) -> None:
    """The row, its columns and its checksum are a format: older journals have the same."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, "0123456789ab")
    position = Position(version=12, data_position=96, loss_scale=1.0)
    journal.decide(JournalDecision(epoch=3, record=RECORD, position=position, metrics_json=""))
    assert journal.load().record == RECORD
    journal.close()
    with closing(sqlite3.connect(path)) as connection:
        [(*row, text)] = connection.execute("SELECT * FROM decisions")
        columns = [(name, kind) for _, name, kind, *_ in connection.execute(TABLE_INFO)]
    assert row == [1, 3, 12, 15, 2, 0.1, 2.0**-16, 3e-4, 11, 2**63 - 1]
    assert json.loads(text)["checksum"] == CHECKSUM
    names = "seq epoch version attempt decision coefficient inverse_loss_scale learning_rate"
    assert [name for name, _ in columns] == [*names.split(), "bias_step", "incarnation", "position"]
    assert [kind for _, kind in columns] == [
        *["INTEGER"] * 5,
        *["REAL"] * 3,
        *["INTEGER"] * 2,
        "TEXT",
    ]


def test_messages_that_all_members_know() -> None:
    shutdown = pb.Shutdown(keep_memory=False, reason="done", exit_code=5)
    assert event_of(pb.SchedulerMessage(shutdown=shutdown), COMMON_EVENTS) == ShutdownAsked(
        reason="done", code=5, keep_memory=False
    )
    assert event_of(pb.SchedulerMessage(skip=pb.Skip(epoch=1)), COMMON_EVENTS) is None
    memory = pb.MemoryState(incarnation=7, committed=2)
    assert answer(SendDrained(epoch=1), memory).drained == pb.Drained(epoch=1, memory=memory)
    assert answer(SendReady(epoch=2)).ready == pb.Ready(epoch=2)
    failed = answer(SendFailed(error="no", code=3, epoch=1)).failed
    assert failed == pb.Failed(error="no", exit_code=3, epoch=1)
