"""Bytes that a device holds while it runs an order; passes decide by them.

Counted are weights, accumulated gradients and static bytes of all its stages (two stages if weights
are streamed). Each micro-batch adds the tensors that forwards, recomputations and split backwards
leave. :mod:`penstock.planner.memory.footprint` has transfers, posted receives and the memory of
plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.host.sums import added
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.schedule.layout import Order, OrderedInstruction, Residency, StageLayout
from penstock.planner.schedule.lowering.weights import NUM_WEIGHT_BUFFERS
from penstock.protocol.plan.instructions import Forward, Keep, SwapIn, SwapOut
from penstock.protocol.plan.resources import Kind, Place, PlanFacts, StateKind, TensorKind, boundary
from penstock.protocol.plan.semantics import COMPUTES, GRAPHS, makes, side_of, takes

_Changes = Collection[tuple[Place, float]]
"""Bytes by stage and micro-batch that an instruction brings or, negative, takes away."""


@dataclass(slots=True, kw_only=True)
class OrderMemory:
    """Counts the bytes of one device, instruction by instruction.

    ``fixed_bytes`` do not depend on the order. ``work_bytes``: held for a (stage, micro-batch);
    ``swapped_bytes``: the part of them elsewhere; ``drops``: operators that forwards have dropped
    so far (``facts`` uses the same mapping).
    """

    facts: PlanFacts
    drops: dict[Place, tuple[str, ...]]
    costs: Costs
    fixed_bytes: float
    work_bytes: dict[Place, float] = field(default_factory=dict)
    swapped_bytes: dict[Place, float] = field(default_factory=dict)
    held_bytes: float = 0.0

    @classmethod
    def of(
        cls, layout: StageLayout, residency: Residency, costs: Costs, device: int
    ) -> OrderMemory:
        """Returns an empty device."""
        stages = {layout.backward[b].blocks: b for b in layout.backward_stages_on(device)}
        stages |= {layout.forward[f].blocks: f for f in layout.forward_stages_on(device)}
        sizes = sorted(map(_fixed_bytes, map(costs.of, stages)), reverse=True)
        if residency is Residency.STREAMED:
            sizes = sizes[:NUM_WEIGHT_BUFFERS]
        drops: dict[Place, tuple[str, ...]] = {}
        return cls(
            facts=PlanFacts(layout=layout, drops=drops),
            drops=drops,
            costs=costs,
            fixed_bytes=added(sizes),
        )

    @property
    def total_bytes(self) -> float:
        """The bytes that are held between instructions."""
        return self.fixed_bytes + self.held_bytes

    def needed_bytes(self, instruction: OrderedInstruction) -> float:
        """Returns the bytes held while an instruction runs next: what was there, what it makes, and
        its workspace.
        """
        return self._needed_bytes(instruction, self._changes(instruction))

    def apply(self, instruction: OrderedInstruction) -> None:
        """Runs an instruction."""
        self._apply(instruction, self._changes(instruction))

    def peak_of(self, order: Iterable[OrderedInstruction]) -> float:
        """Runs an order; returns the most bytes that were held meanwhile."""
        peak = self.total_bytes
        for instruction in order:
            changes = self._changes(instruction)  # once: searches spend much of their time here
            peak = max(peak, self._needed_bytes(instruction, changes))
            self._apply(instruction, changes)
        return peak

    def _needed_bytes(self, instruction: OrderedInstruction, changes: _Changes) -> float:
        more = added(max(change, 0.0) for _, change in changes)
        return self.total_bytes + more + self._cost(instruction).workspace_bytes

    def _apply(self, instruction: OrderedInstruction, changes: _Changes) -> None:
        for work, change in changes:
            self.work_bytes[work] = self.work_bytes.get(work, 0.0) + change
            self.held_bytes += change
            if isinstance(instruction, SwapOut):
                self.swapped_bytes[work] = -change
        if isinstance(instruction, Forward) and instruction.keep is Keep.SELECTIVE:
            self.drops[instruction.stage, instruction.micro_batch] = instruction.drop

    def _cost(self, instruction: Any) -> BlockCost:
        if not isinstance(instruction, COMPUTES):
            return BlockCost()
        stages = self.facts.layout.stages(side_of(instruction))
        return self.costs.of(stages[instruction.stage].blocks)

    def _changes(self, instruction: OrderedInstruction) -> _Changes:
        """Returns by stage and micro-batch the bytes that come (or, negative, go)."""
        match instruction:
            case SwapOut(stage=s, micro_batch=m, fraction=fraction):
                return [((s, m), -fraction * self._held(s, m))]
            case SwapIn(stage=s, micro_batch=m):
                return [((s, m), self.swapped_bytes.get((s, m), 0.0))]
        changes: dict[Place, float] = defaultdict(float)
        for kind, stage, m in takes(instruction, self.facts):
            if isinstance(kind, StateKind):  # a checkpoint stays with its graph
                changes[stage, m] -= self._held(stage, m)
        for kind, stage, m in makes(instruction, self.facts):
            changes[stage, m] += self._made_bytes(kind, stage, instruction)
        return changes.items()

    def _made_bytes(self, kind: Kind, stage: int, instruction: OrderedInstruction) -> float:
        if kind is TensorKind.CHECKPOINT:
            return self.costs.input_bytes(boundary(self.facts.layout, kind, stage))
        if kind is StateKind.DEFERRED:
            return self._cost(instruction).deferred_bytes
        if kind not in GRAPHS:
            return 0.0  # tensors between stages, and sums, which are there all the time
        cost, drop = self._cost(instruction), getattr(instruction, "drop", ())
        return cost.activation_bytes - cost.drop_bytes(drop)

    def _held(self, stage: int, micro_batch: int) -> float:
        return self.work_bytes.get((stage, micro_batch), 0.0)


def _fixed_bytes(stage: BlockCost) -> float:
    return stage.weight_bytes + stage.device_gradient_bytes + stage.static_bytes


def peak_bytes(
    layout: StageLayout, residency: Residency, costs: Costs, orders: Sequence[Order]
) -> tuple[float, ...]:
    """Returns the most bytes that each device holds while it runs its order."""
    return tuple(
        OrderMemory.of(layout, residency, costs, device).peak_of(order)
        for device, order in enumerate(orders)
    )
