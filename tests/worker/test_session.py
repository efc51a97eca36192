"""What a worker answers to the scheduler's messages, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.host.errors import RefusedError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.trace import TraceLane, TraceLog
from penstock.protocol.run.trace_reading import read_traces
from penstock.workers.data import job_number
from penstock.workers.epoch import EpochContext
from penstock.workers.session import Session, fence_listener
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.trace import TraceRing
from penstock.workers.waiting import Abort, EpochFence


class Scheduler:
    """Delivers prepared messages, seen by the listener as soon as they are queued, and keeps
    answers.
    """

    def __init__(self, listener: Callable[[pb.SchedulerMessage], None]) -> None:
        self._listener = listener
        self._queue: deque[pb.SchedulerMessage] = deque()
        self.answers: list[str] = []

    def say(self, **body: Any) -> None:
        message = pb.SchedulerMessage(**body)
        self._listener(message)
        self._queue.append(message)

    def send(self, message: pb.MemberMessage) -> None:
        kind = message.WhichOneof("body") or ""
        body = getattr(message, kind)
        number = getattr(body, "attempt", getattr(body, "evaluation", ""))
        self.answers.append(f"{kind} {body.epoch} {number}".strip())
        self.last = body

    def receive(self, timeout_s: float | None) -> pb.SchedulerMessage | None:
        return self._queue.popleft() if self._queue else None

    @property
    def idle(self) -> bool:
        return not self._queue


class OneWorker:
    """A session over a cluster of one device."""

    def __init__(self, cluster: Any, trace_path: Path) -> None:
        self.cluster = cluster
        self.trace = TraceRing(TraceLog(trace_path, "worker.0"))
        self.closed = 0
        self.fence = EpochFence()
        self.scheduler = Scheduler(fence_listener(self.fence))
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(self.registry)
        self.session = Session(
            link=self.scheduler,
            builder=self,
            fence=self.fence,
            metrics=self.metrics,
            global_batch=cluster.config.train.global_batch,
        )

    def open(self, begin: pb.Begin, abort: Abort) -> EpochContext:
        self.cluster.begin(begin.epoch)
        context = self.cluster.workers[0].context
        account = self.metrics.account
        return replace(context, abort=abort, trace=self.trace, account=account)

    def close(self) -> None:
        self.closed += 1

    num_batches = 2

    def batches(self, data_position: int) -> Any:
        job = self.cluster.job(seed=data_position)
        return job.batches, job.counted_tokens

    def held_out(self, name: str) -> Any:
        size = self.cluster.config.train.global_batch
        return SimpleNamespace(
            num_batches=self.num_batches, batches=lambda index: self.batches(index * size)
        )

    def run(self) -> list[str]:
        self.session.run(lambda: self.scheduler.idle)
        return self.scheduler.answers

    def outcomes(self, outcome: str) -> float:
        name = "penstock_worker_attempts_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


@pytest.fixture
def worker(make_cluster: Any, tmp_path: Path) -> Iterator[OneWorker]:
    yield OneWorker(make_cluster(workers=1), tmp_path / "trace" / "worker.0.jsonl")


def attempt(epoch: int, number: int) -> pb.RunAttempt:
    return pb.RunAttempt(epoch=epoch, attempt=number, data_position=8 * number, loss_scale=1.0)


def test_an_epoch_with_attempts_and_an_evaluation(worker: OneWorker, tmp_path: Path) -> None:
    say = worker.scheduler.say
    say(drain=pb.Drain(epoch=1))
    say(begin=pb.Begin(epoch=1))
    say(run_attempt=attempt(1, 1))
    say(commit=pb.Commit(epoch=1))
    say(run_attempt=attempt(1, 2))
    say(skip=pb.Skip(epoch=1, attempt=2))
    say(evaluate=pb.Evaluate(epoch=1, evaluation=1))
    assert worker.run() == [
        "drained 1",
        "ready 1",
        "attempt_done 1 1",
        "attempt_done 1 2",
        "evaluation_done 1 1",
    ]
    wanted = [worker.cluster.reference(worker.cluster.job(seed=position)) for position in (0, 8)]
    assert worker.scheduler.last.loss_sum == pytest.approx(
        sum(loss for loss, _ in wanted), rel=1e-6
    )
    assert worker.scheduler.last.loss_tokens == sum(
        worker.cluster.job(seed=position).counted_tokens for position in (0, 8)
    )
    assert worker.outcomes("done") == 4
    check_trace(worker, tmp_path)


def check_trace(worker: OneWorker, run_dir: Path) -> None:
    """Every instruction of two attempts and of an evaluation of two batches, in order."""
    (run_dir / "run.json").write_text("{}")
    (life,) = read_traces(run_dir).members
    executed = [
        (event.phase, event.attempt, event.text)
        for event in life.events
        if event.lane is TraceLane.ISSUE
        or (event.lane is TraceLane.COMPUTE and not event.text.startswith("FW"))
    ]
    plan = worker.cluster.plan
    evaluated = [job_number(1, index) for index in range(2)]
    assert executed == [
        *(("train", n, str(i)) for n in (1, 2) for i in plan.programs[0]),
        *(("eval", n, str(i)) for n in evaluated for i in plan.evaluation[0]),
    ]
    computes = [event for event in life.events if event.lane is TraceLane.COMPUTE]
    assert all(event.start_s + event.waited_s <= event.end_s for event in computes)


def test_attempt_done_carries_loss_and_times(worker: OneWorker) -> None:
    worker.scheduler.say(begin=pb.Begin(epoch=1))
    worker.scheduler.say(run_attempt=attempt(1, 1))
    worker.run()
    done, job = worker.scheduler.last, worker.cluster.job(seed=8)
    assert done.loss_sum == pytest.approx(worker.cluster.reference(job)[0], rel=1e-6)
    assert done.loss_tokens == job.counted_tokens
    assert 0 < done.busy_seconds <= done.wall_seconds
    assert 0 < done.tail_seconds <= done.wall_seconds - done.busy_seconds


def test_a_drain_in_the_queue_ends_the_attempt_before_it(worker: OneWorker) -> None:
    say = worker.scheduler.say
    say(drain=pb.Drain(epoch=1))
    say(begin=pb.Begin(epoch=1))
    say(run_attempt=attempt(1, 1))
    say(drain=pb.Drain(epoch=2))
    say(begin=pb.Begin(epoch=2))
    say(run_attempt=attempt(2, 2))
    assert worker.run() == ["drained 1", "drained 2", "ready 2", "attempt_done 2 2"]


def test_messages_of_other_epochs_are_ignored(worker: OneWorker) -> None:
    say = worker.scheduler.say
    say(run_attempt=attempt(1, 1))
    say(begin=pb.Begin(epoch=2))
    say(run_attempt=attempt(1, 1))
    say(evaluate=pb.Evaluate(epoch=1, evaluation=1))
    assert worker.run() == ["ready 2"]


def test_a_shutdown_ends_the_session_and_the_attempt(worker: OneWorker) -> None:
    say = worker.scheduler.say
    say(begin=pb.Begin(epoch=1))
    say(run_attempt=attempt(1, 1))
    say(shutdown=pb.Shutdown(reason="done"))
    say(run_attempt=attempt(1, 2))
    worker.session.run(lambda: False)
    assert worker.scheduler.answers == []
    assert worker.closed == 1


def test_a_refusal_is_an_error(worker: OneWorker) -> None:
    worker.scheduler.say(refused=pb.Refused(reason="old epoch"))
    with pytest.raises(RefusedError, match="refused by the scheduler: old epoch"):
        worker.session.run(lambda: False)
    assert worker.closed == 1
