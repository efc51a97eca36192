"""The worker between messages: its reactions to the scheduler's messages.

Everything runs on the process's main thread, attempts included. Drain, Refused and Shutdown end the
current attempt: :func:`fence_listener` sees them on the stream's reading thread before they are
queued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from penstock.host import world
from penstock.host.errors import RefusedError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.instructions import Opcode, Program
from penstock.protocol.plan.step import OptimizerStep
from penstock.protocol.run.trace import TraceLane
from penstock.workers.data import Batches, HeldOutData, job_number
from penstock.workers.epoch import EpochContext, Job, JobPhase, PairSums
from penstock.workers.handlers import HANDLERS, Handler
from penstock.workers.interpreter import JobResult, run_job
from penstock.workers.telemetry.account import IdleCause
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.waiting import FOREVER, Abort, EpochFence, Interrupted

_log = logging.getLogger(__name__)


class Link(Protocol):
    """The part of :class:`penstock.protocol.wire.member.MemberLink` that the session uses."""

    def send(self, message: pb.MemberMessage) -> None:
        """Queues a message."""

    def receive(self, timeout_s: float | None) -> pb.SchedulerMessage | None:
        """Returns the next message, None after the timeout."""


class Builder(Protocol):
    """Opens and closes the parts of an epoch."""

    def open(self, begin: pb.Begin, abort: Abort) -> EpochContext:
        """Connects to the epoch's peers and memory."""

    def close(self) -> None:
        """Closes connections and drops weights and received tensors; harmless if none is open."""

    def batches(self, data_position: int) -> Batches:
        """Returns the global batch at a position of the training data."""

    def held_out(self, name: str) -> HeldOutData:
        """Returns the data of an evaluation set."""


def fence_listener(fence: EpochFence) -> Callable[[pb.SchedulerMessage], None]:
    """Returns a listener for the member link. It aborts work that a message makes worthless."""

    def listen(message: pb.SchedulerMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "drain":
            fence.fence(message.drain.epoch, f"drained for membership {message.drain.epoch}")
        elif kind == "refused":
            fence.fence(FOREVER, f"refused: {message.refused.reason}")
        elif kind == "shutdown":
            fence.fence(FOREVER, f"shut down: {message.shutdown.reason}")

    return listen


class Session:
    """One worker process from its first message to its last."""

    def __init__(
        self,
        *,
        link: Link,
        builder: Builder,
        fence: EpochFence,
        metrics: WorkerMetrics,
        global_batch: int,
        handlers: Mapping[Opcode, Handler] = HANDLERS,
    ) -> None:
        self._link = link
        self._builder = builder
        self._fence = fence
        self._metrics = metrics
        self._global_batch = global_batch
        self._instructions = handlers
        self._context: EpochContext | None = None
        self._done = False
        self._handlers: Mapping[str, Callable[[Any], None]] = {
            "drain": self._drain,
            "begin": self._begin,
            "run_attempt": self._run_attempt,
            "evaluate": self._evaluate,
            "commit": self._decided,
            "skip": self._decided,
            "shutdown": self._shutdown,
            "refused": self._refused,
        }

    def run(self, stopped: Callable[[], bool], poll_s: float = 0.2) -> None:
        """Handles messages until Shutdown, or until ``stopped()``.

        Raises:
            RefusedError: the scheduler rejects this process.
            PenstockError: the cause that made work impossible.
        """
        try:
            while not (self._done or stopped()):
                message = self._link.receive(poll_s)
                if message is not None:
                    self.handle(message)
        finally:
            self._fence.fence(FOREVER, "the worker stops")
            self._builder.close()

    def handle(self, message: pb.SchedulerMessage) -> None:
        """Acts on one message; messages that do not concern workers are ignored."""
        kind = message.WhichOneof("body") or ""
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(getattr(message, kind))

    def _drain(self, message: pb.Drain) -> None:
        self._fence.fence(message.epoch, f"drained for membership {message.epoch}")
        self._metrics.account.turn(IdleCause.RECOVERY)
        self._builder.close()
        # From here on this process writes nothing to shared memory until the next Begin.
        self._link.send(pb.MemberMessage(drained=pb.Drained(epoch=message.epoch)))

    def _begin(self, message: pb.Begin) -> None:
        abort = self._fence.enter(message.epoch)
        try:
            abort.check()
            self._context = self._builder.open(message, abort)
        except Interrupted as interruption:
            _log.info("membership %d: not begun: %s", message.epoch, interruption)
            return
        self._link.send(pb.MemberMessage(ready=pb.Ready(epoch=message.epoch)))
        self._metrics.account.turn(IdleCause.SCHEDULER)

    def _run_attempt(self, message: pb.RunAttempt) -> None:
        context = self._current(message.epoch)
        if context is None:
            return
        begun_s = world.perf_counter()
        position = message.data_position
        batches, counted_tokens = self._read(
            context, "train", message.attempt, partial(self._builder.batches, position)
        )
        read_s = world.perf_counter()
        context.trace.record(TraceLane.DATA, "batch", "train", message.attempt, begun_s, read_s)
        job = Job(
            phase="train",
            number=message.attempt,
            base_version=message.base_version,
            data_position=message.data_position,
            loss_scale=message.loss_scale,
            batches=batches,
            counted_tokens=counted_tokens,
            step=_step(message),
        )
        result = self._run(context, job, context.plan.programs[context.device_index])
        if result is not None:
            done = pb.AttemptDone(
                epoch=message.epoch,
                attempt=message.attempt,
                loss_sum=result.loss_sum,
                loss_tokens=result.loss_tokens,
                busy_seconds=result.tally.busy_s,
                wall_seconds=result.wall_s,
                tail_seconds=result.tail_s,
                peak_device_bytes=0 if result.peak is None else round(result.peak.num_bytes),
                device_limit_bytes=round(context.meter.limit_bytes or 0),
                pairs=None if result.pairs is None else result.pairs.message(),
            )
            self._link.send(pb.MemberMessage(attempt_done=done))
        context.trace.flush()  # while the optimizer works

    def _evaluate(self, message: pb.Evaluate) -> None:
        context = self._current(message.epoch)
        if context is None:
            return
        loss_sum, loss_tokens, right_tokens, pairs = 0.0, 0, 0, PairSums()
        data = self._builder.held_out(message.set)
        for index in range(data.num_batches):
            position = index * self._global_batch
            number = job_number(message.evaluation, index)
            batches, counted_tokens = self._read(
                context, "eval", number, partial(data.batches, index)
            )
            job = Job(
                phase="eval",
                number=number,
                base_version=message.base_version,
                data_position=position,
                loss_scale=1.0,
                batches=batches,
                counted_tokens=counted_tokens,
            )
            result = self._run(context, job, context.plan.evaluation[context.device_index])
            if result is None:
                return
            loss_sum += result.loss_sum
            loss_tokens += result.loss_tokens
            right_tokens += result.right_tokens
            pairs += result.pairs or PairSums()
        done = pb.EvaluationDone(
            epoch=message.epoch,
            evaluation=message.evaluation,
            loss_sum=loss_sum,
            loss_tokens=loss_tokens,
            right_tokens=right_tokens,
            pairs=pairs.message() if pairs.counted else None,
        )
        self._link.send(pb.MemberMessage(evaluation_done=done))
        context.trace.flush()

    def _decided(self, message: pb.Commit | pb.Skip) -> None:
        self._metrics.account.decided(message.peers_seconds, message.optimizer_seconds)

    def _read(
        self, context: EpochContext, phase: JobPhase, number: int, read: Callable[[], Batches]
    ) -> Batches:
        self._metrics.account.turn(IdleCause.DATA)
        context.progress.begin("reading the batch", phase, number)
        batches = read()
        self._metrics.account.turn(IdleCause.OVERHEAD)
        return batches

    def _run(self, context: EpochContext, job: Job, program: Program) -> JobResult | None:
        try:
            result = run_job(context, job, program, self._instructions)
        except Interrupted as interruption:
            self._metrics.add_outcome("aborted")
            self._metrics.account.turn(IdleCause.RECOVERY)
            _log.info(
                "membership %d, %s %d: %s", context.epoch, job.phase, job.number, interruption
            )
            return None
        except BaseException:
            self._metrics.add_outcome("failed")
            raise
        self._metrics.add_outcome("done")
        self._metrics.account.turn(IdleCause.PEERS)
        self._measure(result)
        if job.phase == "train":
            work = context.flops
            rows, length = job.batches[0].shape
            self._metrics.add_flops(*(rows * length * f for f in (work.model, work.recomputed)))
        return result

    def _measure(self, result: JobResult) -> None:
        self._metrics.add_instructions(result.tally.counts)
        self._metrics.add_transfers(result.tally.transfers)
        if result.peak is not None and result.held_bytes is not None:
            self._metrics.set_memory(result.held_bytes, result.peak.num_bytes)

    def _shutdown(self, message: pb.Shutdown) -> None:
        _log.info("shut down: %s", message.reason)
        self._done = True

    def _refused(self, message: pb.Refused) -> None:
        raise RefusedError(f"refused by the scheduler: {message.reason}")

    def _current(self, epoch: int) -> EpochContext | None:
        """Returns the epoch's context; None for a message of another epoch."""
        if self._context is not None and self._context.epoch == epoch:
            return self._context
        _log.info("in membership %d: message of membership %d dropped", self._fence.epoch, epoch)
        return None


def _step(message: pb.RunAttempt) -> OptimizerStep | None:
    """Returns the step that the attempt leads to without clipping; None if the optimizer waits for
    the norm.
    """
    if message.hold:
        return None
    return OptimizerStep.speculative(
        version=message.base_version + 1,
        loss_scale=message.loss_scale,
        learning_rate=message.learning_rate,
    )
