"""Routes of tensors in a plan: inputs and outputs of instructions, and sums of gradients.

Programs name no sends and receives for data that devices exchange in collectives:

- Gradient sums, from the other pipeline replicas of a stage to the publishing one
  (:mod:`penstock.protocol.plan.reduction`).
- On devices with a simulated clock that shard weights: the time at which each device enters a
  collective, to all others. A device's time follows from those
  (:mod:`penstock.workers.platforms.emulated`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.protocol.plan.instructions import (
    BackwardInput,
    FetchWeights,
    Instruction,
    Program,
    ReduceGradients,
    SwapOut,
)
from penstock.protocol.plan.layout import StageLayout
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.plan.resources import Place, PlanFacts, TensorKind, boundary
from penstock.protocol.plan.semantics import makes, reads, takes
from penstock.protocol.wire.frames import TransferKind

TensorKey = tuple[TransferKind, int, int]
"""Kind, stage and micro-batch of a tensor."""

Received = tuple[str, str, int, int]
"""``(phase, kind, stage, micro_batch)`` of a transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRouting:
    """The facts of a plan's training programs, and their treatment of (stage, micro-batch) pairs.

    ``split``: pairs with a backward in two halves. ``swapped``: pairs with swapped activations.
    """

    facts: PlanFacts
    reduction: Reduction
    split: frozenset[Place]
    swapped: frozenset[Place]

    @classmethod
    def of(cls, plan: Plan) -> TensorRouting:
        """Returns the routing of all programs of the plan."""
        places: dict[type, set[Place]] = {BackwardInput: set(), SwapOut: set()}
        for program in plan.programs:
            for instruction in program:
                if isinstance(instruction, (BackwardInput, SwapOut)):
                    places[type(instruction)].add((instruction.stage, instruction.micro_batch))
        return cls(
            facts=PlanFacts.of(StageLayout.of(plan), plan.programs),
            reduction=Reduction.of(plan),
            split=frozenset(places[BackwardInput]),
            swapped=frozenset(places[SwapOut]),
        )

    @property
    def layout(self) -> StageLayout:
        """The stages."""
        return self.facts.layout

    def facts_in(self, phase: str) -> PlanFacts:
        """Returns the facts of training, or of an evaluation, which skips no forward."""
        return self.facts if phase == "train" else PlanFacts(layout=self.layout)


def tensor_taken(instruction: Instruction, facts: PlanFacts) -> TensorKey | None:
    """Returns the tensor that an instruction takes. ``None``: the instruction starts from the
    batch, the loss, or the tensors that its own stage kept.
    """
    for kind, stage, micro_batch in takes(instruction, facts):
        if isinstance(kind, TensorKind):
            return kind.value, stage, micro_batch
    return None


def tensors_awaited(instruction: Instruction, facts: PlanFacts) -> Iterator[TensorKey]:
    """Yields tensors that an instruction waits for and leaves to a later instruction."""
    gone = frozenset(takes(instruction, facts))
    for resource in reads(instruction, facts):
        if isinstance(resource.kind, TensorKind) and resource not in gone:
            yield resource.kind.value, resource.stage, resource.micro_batch


def tensors_left(
    instruction: Instruction, facts: PlanFacts
) -> Mapping[int, tuple[TransferKind, int]]:
    """Returns kind and stage of the tensors that an instruction produces. Keys are blocks; a tensor
    is the input of its block.
    """
    return {
        boundary(facts.layout, kind, stage): (kind.value, stage)
        for kind, stage, _ in makes(instruction, facts)
        if isinstance(kind, TensorKind)
    }


def collective_receives(
    plan: Plan, routing: TensorRouting, device: int, *, modelled: bool
) -> frozenset[Received]:
    """Returns the receives of a device from collectives: gradient sums, and, if it is ``modelled``,
    entries.
    """
    receives: set[Received] = {
        ("train", "reduction", sender, 0)
        for stage in routing.layout.backward_stages_on(device)
        for sender in routing.reduction.senders(stage)
    }
    if modelled and plan.shards_weights:
        receives.update(_entries("train", plan.programs, device))
        receives.update(_entries("eval", plan.evaluation, device))
    return frozenset(receives)


def collective_peers(
    plan: Plan, routing: TensorRouting, device: int, *, modelled: bool
) -> frozenset[int]:
    """Returns the devices that receive messages of a device in collectives."""
    if modelled and plan.shards_weights:
        return frozenset(range(plan.num_devices)) - {device}
    return frozenset(
        routing.reduction.root_device(stage)
        for stage in routing.layout.backward_stages_on(device)
        if not routing.reduction.publishes(stage)
    )


def _entries(phase: str, programs: tuple[Program, ...], device: int) -> Iterator[Received]:
    """Yields the entries of other devices that ``device`` receives. Every FETCH_WEIGHTS and
    REDUCE_GRADIENTS of a program is a collective, in its order.
    """
    collectives = sum(isinstance(i, FetchWeights | ReduceGradients) for i in programs[device])
    for number in range(collectives):
        for other in range(len(programs)):
            if other != device:
                yield phase, "entry", number, other
