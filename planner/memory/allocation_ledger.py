"""Books of the memory that instructions of a program take from a device and give back.

The books are running totals, one step per instruction. :mod:`penstock.planner.memory.footprint`
puts devices together, and says which bytes count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.host.sums import added
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.schedule.layout import StageLayout
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Phase,
    Program,
    Recompute,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.plan.resources import (
    RESIDENT_BYTES,
    PlanFacts,
    Resource,
    StateKind,
    TensorKind,
    boundary,
    residents_of,
    staging_bytes,
)
from penstock.protocol.plan.semantics import (
    GRAPHS,
    Lane,
    WeightUse,
    makes,
    reads,
    row_of,
    side_of,
    takes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """Says which bytes are with ``peer`` (or the host) between two positions of a program."""

    peer: int | None
    num_bytes: float
    out_at: int
    in_at: int


class Sizes:
    """Returns the bytes of stages, and remembers them."""

    def __init__(self, plan: Plan, layout: StageLayout, costs: Costs) -> None:
        self.layout = layout
        self.forward = [costs.of(stage.blocks) for stage in layout.forward]
        self.backward = [costs.of(stage.blocks) for stage in layout.backward]
        self.costs = costs
        self.blocks = costs.blocks
        self.facts = PlanFacts.of(layout, plan.programs)
        self.reduction = Reduction.of(plan)
        self.separate_memory = costs.separate_memory
        self._copies = layout.num_routes if plan.shards_weights else 1
        self._concatenates = plan.concatenates_gradients
        self._dropped: dict[tuple[int, tuple[str, ...]], float] = {}

    def stage(self, instruction: Any) -> BlockCost:
        """Returns the costs of the stage that an instruction names."""
        stage: int = instruction.stage
        forward = side_of(instruction) is Phase.FORWARD
        return self.forward[stage] if forward else self.backward[stage]

    def dropped(self, stage: int, drop: tuple[str, ...]) -> float:
        """Returns the bytes that a selective forward does not keep."""
        key = (stage, drop)
        if key not in self._dropped:
            self._dropped[key] = self.forward[stage].drop_bytes(drop)
        return self._dropped[key]

    def of_tensor(self, kind: TensorKind, stage: int) -> float:
        """Returns the bytes of a tensor that travels between stages."""
        return self.costs.input_bytes(boundary(self.layout, kind, stage))

    def of_graph(self, instruction: Forward | Recompute) -> float:
        """Returns the bytes of what stays for the backward: all, less what a FORWARD drops."""
        drop = instruction.drop if isinstance(instruction, Forward) else ()
        dropped = self.dropped(instruction.stage, drop) if drop else 0.0
        return self.stage(instruction).activation_bytes - dropped

    def workspace_of(self, instruction: Any) -> float:
        """Returns the bytes that a compute instruction needs while it runs."""
        num_bytes = self.stage(instruction).workspace_of(instruction)
        if isinstance(instruction, Forward) and instruction.drop:  # they go when their block ends
            blocks = self.layout.forward[instruction.stage].blocks
            num_bytes += max(self.blocks[b].remade_bytes(instruction.drop) for b in blocks)
        if isinstance(instruction, Recompute):  # what it reads goes while it runs
            drop = self.facts.drops.get((instruction.stage, instruction.micro_batch), ())
            num_bytes += self.backward[instruction.stage].source_bytes(drop)
        if isinstance(instruction, BackwardWeight):
            num_bytes += self.joined_bytes(instruction)
        if isinstance(instruction, Backward | BackwardInput):
            num_bytes += self.inner_gradient_bytes(instruction.stage)
        return num_bytes

    def inner_gradient_bytes(self, stage: int) -> float:
        """Returns the bytes of the gradient between the blocks of a backward stage. Where the stage
        makes one of its own input, that one's room is free until then.
        """
        blocks = self.layout.backward[stage].blocks
        if len(blocks) == 1 or not self.layout.is_first_backward(stage):
            return 0.0
        return self.costs.input_bytes(blocks.start + 1)

    def joined_bytes(self, work: BackwardWeight) -> float:
        """Returns the bytes of copies that concatenation makes at a time: at most those of a block,
        since it joins one product after the other.
        """
        if not self._concatenates or len(work.micro_batches) == 1:
            return 0.0
        blocks = self.layout.backward[work.stage].blocks
        return len(work.micro_batches) * max(self.blocks[b].deferred_bytes for b in blocks)

    def static_bytes(self, device: int) -> float:
        """Returns the bytes that a device always keeps for its backward stages, and the constants
        of its stages. If devices share weights, the bytes are those of its shard.
        """
        backward = [self.backward[b] for b in self.layout.backward_stages_on(device)]
        forward = [self.forward[f] for f in self.layout.forward_stages_on(device)]
        constant_bytes = max((stage.constant_bytes for stage in backward + forward), default=0.0)
        return added(stage.static_bytes for stage in backward) / self._copies + constant_bytes


class MemoryBooks:
    """The books of one device, written when they are made.

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
        self._entries: dict[Resource, float] = {}
        self._afterwards: list[tuple[Resource, float]] = []
        self._accumulating: set[int] = set()
        self._on_their_way: list[Resource] = []
        self._leaving: int | None = None
        """The stage with the sums that were offloaded last; the sums may not have left yet."""
        self._out: dict[Resource, tuple[int, float]] = {}
        # UPDATE runs while later instructions run, in buffers that stay.
        updated = (sizes.blocks[u.block].parameters for u in program if isinstance(u, Update))
        largest = max(updated, default=0.0) if sizes.separate_memory else 0.0
        self._staging = staging_bytes(largest)
        kept = added(sizes.blocks[b].parameters for b in residents_of(program))
        self.resident_bytes = RESIDENT_BYTES * kept
        for instruction in program:
            self._book(instruction)

    def _book(self, instruction: Instruction) -> None:
        row = row_of(instruction)
        self._workspace = 0.0
        if row.lane is Lane.COMPUTE:
            self._workspace = self._sizes.workspace_of(instruction)
        elif row.weights is WeightUse.FETCHES:
            self._weights += self._sizes.stage(instruction).weight_bytes
        elif row.weights is WeightUse.RELEASES:
            self._weights -= self._sizes.stage(instruction).weight_bytes
        if isinstance(instruction, SwapOut | SwapIn):
            self._swap(instruction)
        elif row.reads or row.makes:
            self._change(instruction)
        if row.lane is Lane.COMPUTE:
            self._computed()
        self.weights.append(self._weights)
        self.gradients.append(self._gradients)
        self.activations.append(self._activations)
        self.workspace.append(self._workspace + self._staging)
        self.host.append(self._host)
        for resource, num_bytes in self._afterwards:
            self._hold(resource, num_bytes)
        self._afterwards.clear()

    def _change(self, instruction: Instruction) -> None:
        """Books what an instruction takes and makes; sums, of all micro-batches, apart."""
        facts, sending = self._sizes.facts, row_of(instruction).lane is Lane.LINK
        made = list(makes(instruction, facts))
        is_part = any(resource.kind in GRAPHS for resource in made)
        for taken in takes(instruction, facts):
            if taken.kind is StateKind.SUMS:
                self._offload(taken.stage)
            elif sending:
                self._sent(taken)
            elif is_part:  # of the graph, which has bytes of its own
                self._hold(taken, 0.0)
            else:
                self._later(taken)
            if taken.kind is StateKind.GRAPH:
                self._accumulate(taken.stage)
        for resource in made:
            if resource.kind is not StateKind.SUMS:
                hold = self._later if self._replaces(resource, instruction) else self._hold
                hold(resource, self._bytes(resource, instruction))

    def _replaces(self, made: Resource, instruction: Instruction) -> bool:
        """Returns whether a tensor takes the place of another: the rest of a graph, or the input of
        a forward stage. The input is the checkpoint of a backward stage that starts there.
        """
        if made.kind is TensorKind.CHECKPOINT and isinstance(instruction, Forward):
            layout = self._sizes.layout
            start = layout.forward[instruction.stage].start
            return layout.backward[made.stage].start == start
        return made.kind is StateKind.DEFERRED

    def _bytes(self, made: Resource, instruction: Any) -> float:
        if isinstance(made.kind, TensorKind):
            return self._sizes.of_tensor(made.kind, made.stage)
        if made.kind is StateKind.DEFERRED:
            return self._sizes.stage(instruction).deferred_bytes
        return self._sizes.of_graph(instruction)

    def _hold(self, resource: Resource, num_bytes: float) -> None:
        """Books that from now on so many bytes are held for something."""
        self._activations += num_bytes - self._entries.pop(resource, 0.0)
        if num_bytes:
            self._entries[resource] = num_bytes

    def _later(self, resource: Resource, num_bytes: float = 0.0) -> None:
        """Books the same when the instruction has run."""
        self._afterwards.append((resource, num_bytes))

    def _accumulate(self, stage: int) -> None:
        """Begins the sums of a stage. Its first backward waits until nothing leaves but what was
        offloaded last.
        """
        if stage not in self._accumulating:
            self._accumulating.add(stage)
            self._gradients = added(map(self._sum_bytes, self._accumulating))
            if self._leaving is not None:
                self._gradients += self._sum_bytes(self._leaving)

    def _offload(self, stage: int) -> None:
        """Ends the sums of a stage. Where those of other routes are added, one is here at a time.
        Sums that are sent elsewhere are gone; a copy to the host may take longer.
        """
        sizes = self._sizes
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

    def _sent(self, resource: Resource) -> None:
        """Books a send. Messages from the device's own memory are sent from the tensors themselves,
        while the next instruction runs. So they are expected to be gone when another instruction
        has computed.
        """
        if self._sizes.separate_memory:
            self._later(resource)
        else:
            self._on_their_way.append(resource)

    def _computed(self) -> None:
        for resource in self._on_their_way:
            self._later(resource)
        self._on_their_way.clear()

    def _swap(self, swap: SwapOut | SwapIn) -> None:
        """Books that a share of what a forward keeps leaves when the instruction has run, or is
        back as soon as it runs.
        """
        facts, now = self._sizes.facts, len(self.weights)
        graph = next(kept for kept in reads(swap, facts) if kept.kind in GRAPHS)
        kept_bytes = self._entries.get(graph, 0.0)
        if isinstance(swap, SwapOut):
            gone = kept_bytes * swap.fraction
            self._out[graph] = (now, gone)
            self._later(graph, kept_bytes - gone)
            self._host += gone if swap.peer is None else 0.0
            return
        out_at, gone = self._out.pop(graph)
        self._hold(graph, kept_bytes + gone)
        self._host -= gone if swap.peer is None else 0.0
        self.swaps.append(Swapped(peer=swap.peer, num_bytes=gone, out_at=out_at, in_at=now))
