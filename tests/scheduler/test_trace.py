"""Attempts and decisions in the scheduler's trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.daemons.scheduler.machine.events import (
    Effect,
    JournalDecision,
    JournalEpoch,
    JournalEvaluation,
    Send,
)
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.trace import DecisionTrace
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.trace import TraceEvent, TraceLog
from penstock.protocol.run.trace_reading import read_traces
from penstock.shm.control import CommitRecord, Decision


def send(**body: Any) -> list[Effect]:
    """One message to two members."""
    message = pb.SchedulerMessage(**body)
    return [Send(member=member, message=message) for member in ("optimizerd.a", "worker.0")]


def decision(attempt: int, kind: Decision) -> JournalDecision:
    record = CommitRecord(
        version=1,
        attempt=attempt,
        decision=kind,
        coefficient=1.0,
        inverse_loss_scale=1.0,
        learning_rate=0.1,
        bias_step=1,
        incarnation=1,
    )
    position = Position(version=1, data_position=8, loss_scale=1.0)
    return JournalDecision(epoch=1, record=record, position=position, metrics_json="")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text("{}")
    return tmp_path


STORY: list[list[Effect]] = [
    send(run_attempt=pb.RunAttempt(attempt=1)),
    [decision(1, Decision.COMMIT), *send(commit=pb.Commit())],
    send(run_attempt=pb.RunAttempt(attempt=2)),
    send(amend=pb.Amend(attempt=2)),
    [decision(2, Decision.AMEND), *send(commit=pb.Commit())],
    send(evaluate=pb.Evaluate(evaluation=1)),
    [
        JournalEvaluation(
            evaluation=1,
            score=Score(set_name="eval", version=2, loss=1.0, accuracy=None),
            metrics_json="",
        )
    ],
    send(run_attempt=pb.RunAttempt(attempt=3)),
    [JournalEpoch(epoch=2, next_attempt=4, pids=())],
    send(run_attempt=pb.RunAttempt(attempt=4)),
    [decision(4, Decision.SKIP), *send(skip=pb.Skip(attempt=4))],
    send(run_attempt=pb.RunAttempt(attempt=5)),
    [decision(5, Decision.COMMIT), *send(commit=pb.Commit())],
    send(run_attempt=pb.RunAttempt(attempt=6)),
    [decision(6, Decision.COMMIT), *send(commit=pb.Commit())],
]


def traced(run: Path, every: int) -> list[TraceEvent]:
    trace = DecisionTrace(TraceLog.of_run(run, "schedulerd", every=every))
    for effects in STORY:
        for effect in effects:
            trace.begins(effect)
        trace.done()
    (life,) = read_traces(run).members
    return list(life.events)


def test_one_thing_ends_where_the_next_begins(run: Path) -> None:
    events = traced(run, every=1)
    assert [(event.text, event.attempt) for event in events] == [
        ("attempt", 1),
        ("commit", 1),
        ("attempt", 2),
        ("amending", 2),
        ("amend", 2),
        ("evaluation", 0),
        ("broken", 3),
        ("attempt", 4),
        ("skip", 4),
        ("attempt", 5),
        ("commit", 5),
        ("attempt", 6),
        ("commit", 6),
    ]
    ends = [event.end_s for event in events]
    starts = [event.start_s for event in events]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_of_a_sampled_attempt_what_follows_is_told_as_well(run: Path) -> None:
    """The step ends where that begins."""
    assert [(event.text, event.attempt) for event in traced(run, every=2)] == [
        ("attempt", 2),
        ("amending", 2),
        ("amend", 2),
        ("evaluation", 0),
        ("attempt", 4),
        ("skip", 4),
        ("attempt", 5),
        ("attempt", 6),
        ("commit", 6),
    ]


def test_a_decision_that_the_next_attempt_follows_at_once_is_written(run: Path) -> None:
    trace = DecisionTrace(TraceLog.of_run(run, "schedulerd", every=1))
    both = [decision(1, Decision.COMMIT), *send(run_attempt=pb.RunAttempt(attempt=2))]
    for effects in (send(run_attempt=pb.RunAttempt(attempt=1)), both):
        for effect in effects:
            trace.begins(effect)
        trace.done()
    (life,) = read_traces(run).members
    assert [(e.text, e.attempt) for e in life.events] == [("attempt", 1), ("commit", 1)]


def test_nothing_is_looked_at_unless_traced(run: Path) -> None:
    trace = DecisionTrace(TraceLog.of_run(run, "schedulerd", every=0))
    for effect in send(run_attempt=pb.RunAttempt(attempt=1)):
        trace.begins(effect)
    trace.done()
    assert not (run / "trace").exists()
