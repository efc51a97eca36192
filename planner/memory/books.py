"""Books what the instructions of a program take from a device's memory and give back.

Running totals, one step per instruction. What is counted is said in
:mod:`penstock.planner.memory.footprint`, which puts devices together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.layout import StageLayout, skipped_forwards
from penstock.planner.tensors import Tensor, TensorKind
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    FetchWeights,
    Forward,
    Instruction,
    Keep,
    OffloadGradients,
    Phase,
    Program,
    Recompute,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    ReleaseWeights,
    SendActivation,
    SendCheckpoint,
    SendGradient,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.plan.updating import RESIDENT_BYTES, residents_of, staging_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """Bytes that are with ``peer`` (or the host) from one position of a program to another."""

    peer: int | None
    num_bytes: float
    out_at: int
    in_at: int


class Sizes:
    """Bytes of stages, looked up once."""

    def __init__(self, plan: Plan, layout: StageLayout, costs: Costs) -> None:
        self.layout = layout
        self.forward = [costs.of(stage.blocks) for stage in layout.forward]
        self.backward = [costs.of(stage.blocks) for stage in layout.backward]
        self.inputs = [
            0.0 if stage.start == 0 else costs.blocks[stage.start - 1].output_bytes
            for stage in layout.backward
        ]
        self.blocks = costs.blocks
        self.skipped = skipped_forwards(layout, plan.programs)
        self.reduction = Reduction.of(plan)
        self.separate_memory = costs.separate_memory
        self._copies = layout.num_routes if plan.shards_weights else 1
        self._concatenates = plan.concatenates_gradients
        self._dropped: dict[tuple[int, tuple[str, ...]], float] = {}

    def stage(self, index: int, phase: Phase) -> BlockCost:
        """Costs of a forward or backward stage."""
        return (self.forward if phase is Phase.FORWARD else self.backward)[index]

    def dropped(self, stage: int, drop: tuple[str, ...]) -> float:
        """What a selective forward does not keep."""
        key = (stage, drop)
        if key not in self._dropped:
            self._dropped[key] = self.forward[stage].drop_bytes(drop)
        return self._dropped[key]

    def of_tensor(self, tensor: Tensor) -> float:
        """Bytes of a tensor that travels between stages."""
        if tensor.kind is TensorKind.ACTIVATION:
            return self.forward[tensor.stage].output_bytes
        return self.inputs[tensor.stage]

    def joined_bytes(self, work: BackwardWeight) -> float:
        """Copies that concatenation makes at a time: of one product, so at most of a block."""
        if not self._concatenates or len(work.micro_batches) == 1:
            return 0.0
        blocks = self.layout.backward[work.stage].blocks
        return len(work.micro_batches) * max(self.blocks[b].deferred_bytes for b in blocks)

    def static_bytes(self, device: int) -> float:
        """What a device keeps for its backward stages all the time, its shard if all share; and
        what all its stages are called with.
        """
        backward = [self.backward[b] for b in self.layout.backward_stages_on(device)]
        forward = [self.forward[f] for f in self.layout.forward_stages_on(device)]
        constant_bytes = max((stage.constant_bytes for stage in backward + forward), default=0.0)
        return sum(stage.static_bytes for stage in backward) / self._copies + constant_bytes


_COMPUTING = (Forward, Recompute, Backward, BackwardInput, BackwardWeight)

_Key = tuple[str, int, int]
"""A graph, checkpoint, activation or gradient: what, stage, micro-batch."""


class Ledger:
    """The books of one device, written when it is made.

    ``weights``, ``gradients``, ``activations``, ``workspace``, ``host``: bytes while each
    instruction runs. ``swaps``: what was swapped out, and when. ``resident_bytes``: of state that
    updates leave, all the time.
    """

    def __init__(self, sizes: Sizes, program: Program) -> None:
        self.weights: list[float] = []
        self.gradients: list[float] = []
        self.activations: list[float] = []
        self.workspace: list[float] = []
        self.host: list[float] = []
        self.swaps: list[Swapped] = []
        self._sizes = sizes
        self._weights = self._activations = self._gradients = self._workspace = self._host = 0.0
        self._entries: dict[_Key, float] = {}
        self._afterwards: list[tuple[_Key, float]] = []
        self._accumulating: set[int] = set()
        self._on_their_way: list[_Key] = []
        self._leaving: int | None = None
        """The stage whose sums were offloaded last, and may not have left yet."""
        self._out: dict[tuple[int, int], tuple[int, float]] = {}
        # UPDATE runs beside what follows it, in buffers that stay.
        updated = (sizes.blocks[u.block].parameters for u in program if isinstance(u, Update))
        largest = max(updated, default=0.0) if sizes.separate_memory else 0.0
        self._staging = staging_bytes(largest)
        kept = sum(sizes.blocks[b].parameters for b in residents_of(program))
        self.resident_bytes = RESIDENT_BYTES * kept
        for instruction in program:
            self._book(instruction)

    def _book(self, instruction: Instruction) -> None:
        rule = _RULES.get(type(instruction))
        self._workspace = 0.0
        if rule is not None:
            rule(self, instruction)
        if isinstance(instruction, _COMPUTING):
            self._computed()
        self.weights.append(self._weights)
        self.gradients.append(self._gradients)
        self.activations.append(self._activations)
        self.workspace.append(self._workspace + self._staging)
        self.host.append(self._host)
        for key, num_bytes in self._afterwards:
            self._hold(key, num_bytes)
        self._afterwards.clear()

    def _hold(self, key: _Key, num_bytes: float) -> None:
        """From now on so many bytes are held for something."""
        self._activations += num_bytes - self._entries.pop(key, 0.0)
        if num_bytes:
            self._entries[key] = num_bytes

    def _later(self, key: _Key, num_bytes: float = 0.0) -> None:
        """The same, when the instruction has run."""
        self._afterwards.append((key, num_bytes))

    def _fetch(self, fetch: FetchWeights) -> None:
        self._weights += self._sizes.stage(fetch.stage, fetch.phase).weight_bytes

    def _release(self, release: ReleaseWeights) -> None:
        self._weights -= self._sizes.stage(release.stage, release.phase).weight_bytes

    def _forward(self, work: Forward) -> None:
        s, m, layout, sizes = work.stage, work.micro_batch, self._sizes.layout, self._sizes
        cost = sizes.forward[s]
        keeps_graph = work.keep is Keep.ALL or work.keep is Keep.SELECTIVE
        self._workspace = cost.by_kind.graph if keeps_graph else cost.by_kind.forward
        if keeps_graph:
            self._hold(("activation", s - 1, m), 0.0)  # the graph saves it
            dropped = sizes.dropped(s, work.drop) if work.drop else 0.0
            self._hold(("graph", s, m), cost.activation_bytes - dropped)
        self._later(("activation", s - 1, m))
        if work.keep is Keep.INPUT:
            start = layout.forward[s].start
            for b in layout.checkpoints_of(s):
                # At the start of the stage it is the activation that came, under another name.
                keep = self._later if layout.backward[b].start == start else self._hold
                keep(("checkpoint", b, m), sizes.inputs[b])
        if layout.is_last_forward(s):
            return
        following = layout.checkpoint_after(s)
        if (s + 1, m) not in sizes.skipped:
            self._hold(("activation", s, m), cost.output_bytes)
        elif following is not None:
            self._hold(("checkpoint", following, m), cost.output_bytes)

    def _recompute(self, work: Recompute) -> None:
        b, m = work.stage, work.micro_batch
        cost = self._sizes.backward[b]
        self._workspace = cost.by_kind.graph
        self._hold(("checkpoint", b, m), 0.0)  # the graph saves it
        self._hold(("graph", b, m), cost.activation_bytes)

    def _backward(self, work: Backward | BackwardInput) -> None:
        b, m = work.stage, work.micro_batch
        cost = self._sizes.backward[b]
        whole, workspaces = type(work) is Backward, cost.by_kind
        self._workspace = workspaces.backward if whole else workspaces.backward_input
        self._accumulate(b)
        self._hold(("gradient", b, m), self._sizes.inputs[b])
        if not self._sizes.layout.is_last_backward(b):
            self._later(("gradient", b + 1, m))
        self._later(("graph", b, m), 0.0 if whole else cost.deferred_bytes)

    def _backward_weight(self, work: BackwardWeight) -> None:
        sizes = self._sizes
        self._workspace = sizes.backward[work.stage].by_kind.backward_weight
        self._workspace += sizes.joined_bytes(work)
        for m in work.micro_batches:
            self._later(("graph", work.stage, m))

    def _accumulate(self, stage: int) -> None:
        """Its first backward waits until nothing leaves but what was offloaded last."""
        if stage not in self._accumulating:
            self._accumulating.add(stage)
            self._gradients = sum(map(self._sum_bytes, self._accumulating))
            if self._leaving is not None:
                self._gradients += self._sum_bytes(self._leaving)

    def _offload(self, offload: OffloadGradients) -> None:
        """Where sums of other routes are added, one of them is here at a time. Sums that are sent
        elsewhere are gone; a copy to the host may take longer.
        """
        stage, sizes = offload.stage, self._sizes
        if sizes.reduction.senders(stage):
            self._workspace = self._sum_bytes(stage)
        if stage in self._accumulating:
            self._accumulating.remove(stage)
            if sizes.separate_memory and sizes.reduction.publishes(stage):
                self._leaving = stage
            else:
                self._gradients -= self._sum_bytes(stage)

    def _sum_bytes(self, stage: int) -> float:
        return self._sizes.backward[stage].device_gradient_bytes

    def _receive_activation(self, transfer: RecvActivation) -> None:
        num_bytes = self._sizes.forward[transfer.stage].output_bytes
        self._hold(("activation", transfer.stage, transfer.micro_batch), num_bytes)

    def _receive_gradient(self, transfer: RecvGradient) -> None:
        num_bytes = self._sizes.inputs[transfer.stage]
        self._hold(("gradient", transfer.stage, transfer.micro_batch), num_bytes)

    def _receive_checkpoint(self, transfer: RecvCheckpoint) -> None:
        num_bytes = self._sizes.inputs[transfer.stage]
        self._hold(("checkpoint", transfer.stage, transfer.micro_batch), num_bytes)

    def _send_activation(self, transfer: SendActivation) -> None:
        self._sent(("activation", transfer.stage, transfer.micro_batch))

    def _send_gradient(self, transfer: SendGradient) -> None:
        self._sent(("gradient", transfer.stage, transfer.micro_batch))

    def _send_checkpoint(self, transfer: SendCheckpoint) -> None:
        self._sent(("checkpoint", transfer.stage, transfer.micro_batch))

    def _sent(self, key: _Key) -> None:
        """Messages from the device's own memory are sent from where tensors are, beside what comes
        next: that they are gone when another instruction has computed is to be expected.
        """
        if self._sizes.separate_memory:
            self._later(key)
        else:
            self._on_their_way.append(key)

    def _computed(self) -> None:
        for key in self._on_their_way:
            self._later(key)
        self._on_their_way.clear()

    def _swap_out(self, swap: SwapOut) -> None:
        key = ("graph", swap.stage, swap.micro_batch)
        kept = self._entries.get(key, 0.0)
        gone = kept * swap.fraction
        self._out[swap.stage, swap.micro_batch] = (len(self.weights), gone)
        self._later(key, kept - gone)
        if swap.peer is None:
            self._host += gone

    def _swap_in(self, swap: SwapIn) -> None:
        key = ("graph", swap.stage, swap.micro_batch)
        out_at, gone = self._out.pop((swap.stage, swap.micro_batch))
        self._hold(key, self._entries.get(key, 0.0) + gone)
        if swap.peer is None:
            self._host -= gone
        now = len(self.weights)
        self.swaps.append(Swapped(peer=swap.peer, num_bytes=gone, out_at=out_at, in_at=now))


_RULES: Mapping[type[Instruction], Callable[[Ledger, Any], None]] = MappingProxyType(
    {
        FetchWeights: Ledger._fetch,
        ReleaseWeights: Ledger._release,
        Forward: Ledger._forward,
        Recompute: Ledger._recompute,
        Backward: Ledger._backward,
        BackwardInput: Ledger._backward,
        BackwardWeight: Ledger._backward_weight,
        OffloadGradients: Ledger._offload,
        RecvActivation: Ledger._receive_activation,
        RecvGradient: Ledger._receive_gradient,
        RecvCheckpoint: Ledger._receive_checkpoint,
        SendActivation: Ledger._send_activation,
        SendGradient: Ledger._send_gradient,
        SendCheckpoint: Ledger._send_checkpoint,
        SwapOut: Ledger._swap_out,
        SwapIn: Ledger._swap_in,
    }
)
