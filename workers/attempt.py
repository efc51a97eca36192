"""One attempt, or one batch of an evaluation, on one device: the shared state of its instructions.

:class:`Attempt` holds everything that must be gone at its end. :mod:`penstock.workers.epoch` has
the parts that outlive it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from penstock.host import world
from penstock.host.errors import LostMemberError, PenstockError
from penstock.host.sums import added
from penstock.models.forward_storage import ForwardStorage
from penstock.models.runtime import StageOutput
from penstock.models.saved_activations import SavedActivations, SavedTensorPolicy
from penstock.models.split_backward.split import DeferredWeights
from penstock.models.torch_device import SwapStreams
from penstock.protocol.plan.instructions import Instruction, Update
from penstock.protocol.run.trace import TraceLane
from penstock.protocol.wire.frames import TransferKind
from penstock.workers.channels.inbox import NamedTensors, TransferKey
from penstock.workers.epoch import ConnectedScope, EpochContext, Job, PairSums
from penstock.workers.state.gradients import GradientBook
from penstock.workers.state.routing import (
    tensor_taken,
    tensors_awaited,
    tensors_left,
)
from penstock.workers.state.stages import Stages
from penstock.workers.state.updates import UpdateScope
from penstock.workers.telemetry.account import IdleCause
from penstock.workers.telemetry.metrics import KINDS_OF_TRANSFERS
from penstock.workers.telemetry.timing import Tally, Timeline
from penstock.workers.telemetry.usage import MemoryPeak

_CAUSES: Mapping[str, IdleCause] = {
    "activation": IdleCause.ACTIVATIONS,
    "checkpoint": IdleCause.ACTIVATIONS,
    "gradient": IdleCause.GRADIENTS,
    "reduction": IdleCause.GRADIENTS,
}


class UnusedWorkError(PenstockError):
    """The error of an instruction without its input, or of an attempt that ended with unused
    work.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensors:
    """The tensors that an attempt holds for later instructions, by kind (if any), stage and
    micro-batch.
    """

    tensors: Mapping[tuple[str, int, int], NamedTensors]
    posted: Set[tuple[str, int, int]]
    graphs: Mapping[tuple[int, int], StageOutput]
    deferred: Mapping[tuple[int, int], DeferredWeights]


class Attempt:
    """State of one job.

    Tensors that a later instruction takes are kept by (kind, stage, micro-batch): ``activation`` or
    ``gradient`` of the stage that produced it, ``checkpoint`` of the backward stage that needs it.
    """

    def __init__(self, context: EpochContext, job: Job) -> None:
        self.context = context
        self.job = job
        self._facts = context.routing.facts_in(job.phase)
        context.transport.inbox.begin(job.phase, job.number)
        self.tally = Tally()
        self.timeline = Timeline(
            context.device, context.trace, context.account, job.phase, job.number
        )
        self.scope = ConnectedScope(context, job, self.timeline)
        self.gradients = GradientBook(
            table=context.table,
            reduction=context.routing.reduction,
            memory=context.memory,
            device=context.device,
            scope=self.scope,
        )
        self.stages = Stages(
            layout=context.routing.layout,
            table=context.table,
            runtime=context.runtime,
            weights=context.weights,
            gradients=self.gradients,
            scope=self.scope,
        )
        self.update_s = 0.0
        """Seconds that :meth:`finish` waited for updates."""
        self._kept: dict[tuple[str, int, int], NamedTensors] = {}
        self._graphs: dict[tuple[int, int], StageOutput] = {}
        self._deferred: dict[tuple[int, int], DeferredWeights] = {}
        self._swaps: dict[int | None, SwapStreams] = {}
        self._posted: dict[tuple[str, int, int], int] = {}
        """The sending device of each posted receive."""
        self._losses: dict[int, torch.Tensor] = {}
        self._right: dict[int, torch.Tensor] = {}
        self._scores: dict[int, torch.Tensor] = {}

    def keep(
        self, kind: TransferKind, stage: int, micro_batch: int, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Keeps tensors for a later instruction, detached from the graph that made them."""
        key = (kind, stage, micro_batch)
        assert key not in self._kept, f"{key} is kept already"
        self._kept[key] = {name: tensor.detach() for name, tensor in tensors.items()}

    def take(self, kind: TransferKind, stage: int, micro_batch: int) -> NamedTensors:
        """Returns the tensors that an instruction left, or that a posted receive brings after a
        wait.
        """
        key = (kind, stage, micro_batch)
        if key in self._posted:
            return self._receive(kind, stage, micro_batch, self._posted.pop(key))
        if key not in self._kept:
            raise UnusedWorkError(f"{kind} of stage {stage}, micro-batch {micro_batch} is not here")
        return self._kept.pop(key)

    def inputs(self, instruction: Instruction) -> NamedTensors:
        """Returns the tensors that an instruction takes from another one, after a wait. The first
        stage of a pipeline replica starts from the batch, its last backward from the loss: both
        take none.
        """
        key = tensor_taken(instruction, self._facts)
        return {} if key is None else self.take(*key)

    def await_others(self, instruction: Instruction) -> None:
        """Waits for tensors that must be present, but stay for a later instruction."""
        for key in tensors_awaited(instruction, self._facts):
            self.await_posted(*key)

    def left(self, instruction: Instruction) -> Mapping[int, tuple[TransferKind, int]]:
        """Returns the tensors that an instruction leaves
        (:func:`penstock.workers.state.routing.tensors_left`).
        """
        return tensors_left(instruction, self._facts)

    def post(self, kind: TransferKind, stage: int, micro_batch: int, peer: int) -> None:
        """Posts a receive from a device."""
        self._posted[kind, stage, micro_batch] = peer
        self.context.channel.post(self._key(kind, stage, micro_batch))

    def await_posted(self, kind: TransferKind, stage: int, micro_batch: int) -> None:
        """Waits for a posted receive, and keeps its tensors for a later :meth:`take`."""
        key = (kind, stage, micro_batch)
        if key in self._posted:
            self._kept[key] = self.take(kind, stage, micro_batch)

    def send(self, kind: TransferKind, stage: int, micro_batch: int, peer: int) -> None:
        """Sends the tensors of an earlier instruction to a peer."""
        context = self.context
        tensors = self.take(kind, stage, micro_batch)
        key = self._key(kind, stage, micro_batch)
        start = world.perf_counter()
        context.channel.send(peer, key, tensors, context.abort, context.timeout_s)
        seconds = world.perf_counter() - start
        self.tally.transferred("send", KINDS_OF_TRANSFERS[kind], seconds=seconds)

    def forward_storage(
        self, stage: int, micro_batch: int, drop: Sequence[str] = ()
    ) -> ForwardStorage | None:
        """Returns the storage of a forward of a backward stage, as required by the plan's later
        instructions. The outputs of operators ``drop`` are not kept. None: autograd stores the
        graph.
        """
        key, routing, rebind = (
            (stage, micro_batch),
            self.context.routing,
            self.context.plan.rebinds_weights,
        )
        keeps, splits = bool(drop) or rebind or key in routing.swapped, key in routing.split
        if not keeps and not splits:
            return None
        return ForwardStorage(
            weights=self.stages.weight_locations(stage),
            policy=SavedTensorPolicy(drop=frozenset(drop), rebind=rebind) if keeps else None,
            split=splits,
        )

    def keep_graph(self, stage: int, micro_batch: int, output: StageOutput) -> None:
        """Leaves an autograd graph for BACKWARD of the stage."""
        assert (stage, micro_batch) not in self._graphs, f"graph of {stage} {micro_batch} exists"
        self._graphs[stage, micro_batch] = output

    def take_graph(self, stage: int, micro_batch: int) -> StageOutput:
        """Removes and returns the graph, for its one BACKWARD."""
        if (stage, micro_batch) not in self._graphs:
            raise UnusedWorkError(f"graph of stage {stage}, micro-batch {micro_batch} is not here")
        return self._graphs.pop((stage, micro_batch))

    def has_graph(self, stage: int, micro_batch: int) -> bool:
        """Returns whether a forward left a graph, perhaps without the dropped operators'
        outputs.
        """
        return (stage, micro_batch) in self._graphs

    def saved_activations(self, stage: int, micro_batch: int) -> SavedActivations:
        """Returns the saved activations of a stage's graph, to swap them or to recompute dropped
        ones.
        """
        output = self._graphs.get((stage, micro_batch))
        if output is None or output.stored is None or output.stored.activations is None:
            raise UnusedWorkError(
                f"activations of stage {stage}, micro-batch {micro_batch} are not kept here"
            )
        return output.stored.activations

    def defer(self, stage: int, micro_batch: int, deferred: DeferredWeights) -> None:
        """Keeps weight gradients for BACKWARD_WEIGHT."""
        assert (stage, micro_batch) not in self._deferred, f"{stage} {micro_batch} is deferred"
        self._deferred[stage, micro_batch] = deferred

    def take_deferred(self, stage: int, micro_batch: int) -> DeferredWeights:
        """Removes and returns the weight gradients that BACKWARD_INPUT left."""
        if (stage, micro_batch) not in self._deferred:
            raise UnusedWorkError(
                f"deferred weight gradients of stage {stage}, micro-batch {micro_batch}"
                " are not here"
            )
        return self._deferred.pop((stage, micro_batch))

    @property
    def held_tensors(self) -> HeldTensors:
        """A live view of all held tensors."""
        return HeldTensors(
            tensors=self._kept,
            posted=self._posted.keys(),
            graphs=self._graphs,
            deferred=self._deferred,
        )

    def swaps(self, peer: int | None) -> SwapStreams:
        """Returns the streams that copy swapped activations to the host, or to another device of
        the node.
        """
        if peer not in self._swaps:
            distance = None if peer is None else peer - self.context.device_index
            self._swaps[peer] = self.context.device.swap_streams(distance)
        return self._swaps[peer]

    def update(self, instruction: Update) -> None:
        """Starts the preview of a block; :meth:`finish` waits for it. Does nothing in a synchronous
        step, in which the CPU updates all blocks.
        """
        context, step = self.context, self.job.step
        if step is None:
            return
        assert context.updates is not None, "a program with UPDATE needs BlockUpdates"
        scope = UpdateScope(
            epoch=context.epoch,
            attempt=self.job.number,
            step=step,
            abort=context.abort,
            timeout_s=context.timeout_s,
            done=partial(self.scope.previewed, instruction, step.version),
        )
        context.updates.start(instruction.block, scope)

    def count_loss(self, micro_batch: int, output: StageOutput) -> None:
        """Adds the micro-batch's loss to the sum, once; a stage without the head has none."""
        if output.loss_sum is not None:
            assert micro_batch not in self._losses, f"loss of {micro_batch} is counted already"
            self._losses[micro_batch] = output.loss_sum
        if output.right is not None:
            self._right[micro_batch] = output.right
        if output.scores is not None:
            self._scores[micro_batch] = output.scores

    @property
    def loss_sum(self) -> float:
        """Unscaled sum of losses, added in float64 in the order of micro-batches."""
        return added(float(self._losses[m]) for m in sorted(self._losses))

    @property
    def right_tokens(self) -> int:
        """Right predictions of counted tokens of a held-out batch; 0 in training."""
        return sum(int(count) for count in self._right.values())

    @property
    def loss_tokens(self) -> int:
        """Counted tokens of the micro-batches with a loss from this device."""
        return sum(self.job.batches[m].counted_tokens for m in self._losses)

    @property
    def pairs(self) -> PairSums | None:
        """Sums over the pairs of the micro-batches with a loss from this device; None without
        pairs.
        """
        if not self._scores:
            return None
        counted, right, margin_sum = 0, 0, 0.0
        for m in sorted(self._scores):
            batch = self.job.batches[m]
            assert batch.preferences is not None
            margins = batch.preferences.margins(self._scores[m].cpu().numpy())[batch.pairs]
            counted, right = counted + len(margins), right + int((margins > 0.0).sum())
            margin_sum = added([margin_sum, float(margins.sum())])
        return PairSums(counted=counted, right=right, margin_sum=margin_sum)

    def finish(self) -> None:
        """Waits for the last offloads and updates and checks that all results were used.

        Raises:
            UnusedWorkError: names the unused results.
        """
        context, start = self.context, world.perf_counter()
        with context.progress.awaiting("the last gradients to leave", IdleCause.GRADIENTS):
            context.device.finish()
        gone = world.perf_counter()
        self.timeline.resolve(self.tally)
        context.account.waited(IdleCause.GRADIENTS, gone - start)
        if context.updates is not None:
            start = world.perf_counter()
            awaited = f"updates of blocks {context.updates.under_way}"
            with context.progress.awaiting(awaited, IdleCause.OPTIMIZER):
                context.updates.finish(context.abort)
            end = world.perf_counter()
            self.update_s = end - start
            context.account.computed("update", start, end)
        channel = self.context.channel
        channel.check()
        left: dict[str, Sequence[object]] = {
            "kept": sorted(self._kept),
            "graphs": sorted(self._graphs),
            "deferred weight gradients": sorted(self._deferred),
            "posted": sorted(self._posted),
            "received": [str(key) for key in channel.leftovers(self.job.phase, self.job.number)],
            "weights": self.stages.in_use,
            "gradients": self.gradients.unpublished,
        }
        if any(left.values()):
            named = ", ".join(f"{what}: {items}" for what, items in left.items() if items)
            raise UnusedWorkError(f"{self.job.phase} {self.job.number} left behind {named}")

    def drop(self) -> None:
        """Drops everything; no byte is written to shared memory after the return."""
        if self.context.updates is not None:
            self.context.updates.drop()
        self.gradients.drop()
        # Freed now, though an exception's traceback may still refer to the graphs.
        for output in self._graphs.values():
            if output.stored is not None:
                output.stored.discard()
        for deferred in self._deferred.values():
            deferred.discard()
        self._graphs.clear()
        self._deferred.clear()
        self._kept.clear()
        self._posted.clear()
        self.stages.drop()
        # After a failure of the device, the times of its work may be unknown.
        with suppress(RuntimeError):
            self.timeline.resolve(self.tally)

    def record_peak(self, peak: MemoryPeak | None) -> None:
        """Records the device's peak memory, if it was measured."""
        if peak is not None:
            at = world.perf_counter() if peak.at_s is None else peak.at_s
            text = f"{peak.num_bytes:.0f} {peak.during or ''}".rstrip()
            self.scope.trace(TraceLane.MEMORY, text, at, at)

    def _receive(self, kind: TransferKind, stage: int, micro_batch: int, peer: int) -> NamedTensors:
        key, context = self._key(kind, stage, micro_batch), self.context
        start = world.perf_counter()
        with self.scope.awaiting(f"{key} from worker.{peer}", _CAUSES[kind]):
            try:
                tensors = context.channel.take(key, context.abort, context.timeout_s)
            except LostMemberError as error:
                raise LostMemberError(f"{error} from worker.{peer}") from error
        seconds = world.perf_counter() - start
        self.tally.transferred("receive", KINDS_OF_TRANSFERS[kind], seconds=seconds)
        context.meter.received(tensors)
        arrived = context.channel.arrival_s(key)
        if arrived is not None:
            self.scope.trace(TraceLane.ARRIVAL, f"{kind} {stage} {micro_batch}", arrived, arrived)
        return tensors

    def _key(self, kind: TransferKind, stage: int, micro_batch: int) -> TransferKey:
        return TransferKey(
            phase=self.job.phase,
            attempt=self.job.number,
            kind=kind,
            stage=stage,
            micro_batch=micro_batch,
        )
