"""The parts that attempts share: the epoch's context, an attempt's job, and its scope.

:class:`ConnectedScope` connects the gradients, stages and weights of an attempt to optimizerds, to
the control segment, and to telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from penstock.host import world
from penstock.models.data.batch import MicroBatch
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.instructions import FetchWeights, Phase, Update
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.step import OptimizerStep
from penstock.protocol.run.trace import TraceLane
from penstock.protocol.wire.frames import BlockUpdated, GradientReady
from penstock.shm.layout import Ownership
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable
from penstock.workers.channels.base import Channel
from penstock.workers.channels.transport import Transport
from penstock.workers.device import Copied, Device, Runtime, Stamp
from penstock.workers.state.routing import TensorRouting
from penstock.workers.state.updates import BlockUpdates, PreviewedBlock
from penstock.workers.state.weights import WeightLoader
from penstock.workers.telemetry.account import IdleCause, TimeAccount
from penstock.workers.telemetry.progress import Progress
from penstock.workers.telemetry.timing import Timeline
from penstock.workers.telemetry.trace import TraceRing
from penstock.workers.telemetry.usage import Meter
from penstock.workers.telemetry.work import Flops, flops_of
from penstock.workers.waiting import Abort, wait_until

JobPhase = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class EpochContext:
    """The parts that attempts of one epoch share. ``device_index`` numbers the worker's device in
    the plan.
    """

    run_id: str
    epoch: int
    device_index: int
    plan: Plan
    routing: TensorRouting
    table: BlockTable
    ownership: Ownership
    memory: NodeMemory
    runtime: Runtime
    device: Device
    meter: Meter[Any]
    weights: WeightLoader
    transport: Transport
    channel: Channel
    trace: TraceRing
    abort: Abort
    timeout_s: float
    progress: Progress = field(default_factory=Progress)
    account: TimeAccount = field(default_factory=TimeAccount)
    updates: BlockUpdates | None = None
    """Present if the device's program has UPDATE."""

    @cached_property
    def flops(self) -> Flops:
        """The device's work in an attempt, per token of a micro-batch."""
        program = self.plan.programs[self.device_index]
        return flops_of(program, self.routing.layout, self.table)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSums:
    """Number of pairs with a counted token, those with a margin above 0, and the sum of all margins
    in nats.
    """

    counted: int = 0
    right: int = 0
    margin_sum: float = 0.0

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(
            counted=self.counted + other.counted,
            right=self.right + other.right,
            margin_sum=self.margin_sum + other.margin_sum,
        )

    def message(self) -> pb.Pairs:
        """Returns the sums as a message."""
        return pb.Pairs(counted=self.counted, right=self.right, margin_sum=self.margin_sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One pass of a program over one global batch.

    ``number`` is the attempt, or the key of an evaluation batch's messages. ``data_position``
    counts the samples consumed before it. ``counted_tokens`` is that of the global batch, or the
    number of its pairs. ``step`` is the step that UPDATE computes; without one UPDATE does nothing.
    """

    phase: JobPhase
    number: int
    base_version: int
    data_position: int
    loss_scale: float
    batches: Sequence[MicroBatch]
    counted_tokens: int
    step: OptimizerStep | None = None

    @property
    def loss_weight(self) -> float:
        """Factor of the summed loss that makes it the scaled mean over the global batch."""
        return self.loss_scale / max(1, self.counted_tokens)


@dataclass(frozen=True, slots=True)
class ConnectedScope:
    """The :class:`~penstock.workers.state.scope.AttemptScope` of an attempt in an epoch.

    Sends messages to optimizerds, waits on the control segment, and records waits, times and trace.
    """

    context: EpochContext
    job: Job
    timeline: Timeline

    @property
    def epoch(self) -> int:
        """The epoch of the attempt."""
        return self.context.epoch

    @property
    def attempt(self) -> int:
        """The number of the attempt, or the key of an evaluation batch's messages."""
        return self.job.number

    @property
    def base_version(self) -> int:
        """The committed version that the attempt starts from."""
        return self.job.base_version

    @property
    def abort(self) -> Abort:
        """The flag that ends all waits of the epoch."""
        return self.context.abort

    @property
    def timeout_s(self) -> float:
        """Seconds that one wait may take."""
        return self.context.timeout_s

    @contextmanager
    def awaiting(self, what: object, cause: IdleCause) -> Iterator[None]:
        """Measures a wait of the current instruction for work of other processes."""
        start = world.perf_counter()
        try:
            with self.context.progress.awaiting(what, cause):
                yield
        except BaseException:
            self.timeline.waited_in_vain(cause, world.perf_counter() - start)
            raise
        self.timeline.inputs_are_here(cause)

    def published(self, block: int, partial: int) -> None:
        """Notifies the owner's optimizerd of a complete gradient partial; its ready word is set."""
        context = self.context
        message = GradientReady(
            run_id=context.run_id,
            epoch=context.epoch,
            attempt=self.job.number,
            block=block,
            contribution=partial,
        )
        owner = context.ownership.owner[block]
        context.transport.notify(owner, message, context.abort, context.timeout_s)
        published = world.perf_counter()
        self.trace(TraceLane.OFFLOAD, f"{block} {partial}", published, published)

    def await_settled(self, block: int) -> None:
        """Waits until a block of this node is settled: only such blocks have a single copy of
        gradients.
        """
        context, version = self.context, self.job.base_version
        control = context.memory.control
        state_version = control.state_version

        def what() -> str:
            return (
                f"optimizerd to settle block {block} at version {version} before its"
                f" gradients are overwritten (its state is at {state_version(block)})"
            )

        awaited = f"block {block} to be settled at version {version}"
        with self.awaiting(awaited, IdleCause.OPTIMIZER):
            wait_until(
                lambda: state_version(block) == version,
                what,
                context.abort,
                context.timeout_s,
                lambda: control.pin(block) is not None,  # a save reads the state
            )

    def previewed(
        self, instruction: Update, version: int, block: int, done: PreviewedBlock
    ) -> None:
        """Notifies the owner's optimizerd of a previewed block: its last byte is written."""
        context = self.context
        message = BlockUpdated(
            run_id=context.run_id,
            epoch=context.epoch,
            attempt=self.job.number,
            block=block,
            version=version,
            finite=done.status.finite,
            sum_squares=done.status.sum_squares,
            seconds=done.end_s - done.start_s,
        )
        owner = context.ownership.owner[block]
        context.transport.notify(owner, message, context.abort, context.timeout_s)
        self.trace(TraceLane.UPDATE, str(instruction), done.start_s, done.end_s)

    def copied(self, direction: str, kind: str, copied: Copied) -> None:
        """Records a copy to the device (``h2d``) or from it (``d2h``); from any thread."""
        self.timeline.copied(direction, kind, copied)

    def loaded(self, stage: int, phase: Phase, start: Stamp, end: Stamp, *, early: bool) -> None:
        """Records the load of a stage's weights; from any thread."""
        lane = TraceLane.FETCH if early else TraceLane.COMPUTE
        self.timeline.loaded(lane, str(FetchWeights(stage=stage, phase=phase)), start, end)

    def trace(self, lane: TraceLane, text: str, start: float, end: float) -> None:
        """Records an event of the attempt."""
        self.context.trace.record(lane, text, self.job.phase, self.job.number, start, end)
