"""Named tensors in the memory of a device, and further facts of a plan that rows of instructions
need.

A resource is named by kind, stage and micro-batch. :mod:`penstock.protocol.plan.semantics` says
which instruction reads and makes it; the costs know its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from penstock.protocol.plan.instructions import Forward, Instruction, Keep, Phase, Program, Update
from penstock.protocol.plan.layout import StageLayout


class TensorKind(StrEnum):
    """Tensors that travel between stages."""

    ACTIVATION = "activation"
    """The output of a forward stage."""
    GRADIENT = "gradient"
    """The gradient of a backward stage's input."""
    CHECKPOINT = "checkpoint"
    """The input of a backward stage, for its recomputation."""


class StateKind(StrEnum):
    """Tensors that stay on the device that made them."""

    GRAPH = "graph"
    """All that the backward of a stage needs."""
    PARTIAL_GRAPH = "partial graph"
    """The same without the outputs of dropped operators, which a RECOMPUTE makes again."""
    DEFERRED = "deferred"
    """Parts of a graph that a BACKWARD_INPUT leaves for the BACKWARD_WEIGHT."""
    SWAPPED = "swapped"
    """The share of a graph that is elsewhere until the SWAP_IN."""
    SUMS = "sums"
    """Weight gradients of a backward stage, summed over micro-batches."""


Kind = TensorKind | StateKind
Place = tuple[int, int]
"""A stage and a micro-batch."""

ALL = -1
"""Value in the place of a micro-batch: the resource is one for all of them."""


class Resource(NamedTuple):
    """A tensor in the memory of a device; ``micro_batch`` is :data:`ALL` for sums.

    ``stage`` is a forward stage for activations, and for tensors that a FORWARD keeps. Otherwise it
    is a backward stage. Where a FORWARD keeps a graph, the two have the same number.
    """

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts of a plan that rows need in addition to an instruction. ``skipped``: FORWARDs that are
    left out. ``drops``: the operators that other FORWARDs drop, if they do.

    An instruction may be left out if nothing needs its results. That holds for a FORWARD with an
    output that is only needed as the checkpoint of the backward stage that recomputes it. Such a
    backward stage starts at the same block and takes the output of the forward stage *before* as
    its checkpoint.
    """

    layout: StageLayout
    skipped: Set[Place] = frozenset()
    drops: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: StageLayout, programs: Iterable[Iterable[Instruction]]) -> PlanFacts:
        """Returns the facts of a plan's programs, or of orders."""
        present: set[Place] = set()
        drops: dict[Place, tuple[str, ...]] = {}
        for program in programs:
            for instruction in program:
                if type(instruction) is Forward:
                    place = instruction.stage, instruction.micro_batch
                    present.add(place)
                    if instruction.keep is Keep.SELECTIVE:
                        drops[place] = instruction.drop
        batches = [layout.microbatches_of_route[route] for route in layout.forward_routes]
        if len(present) == sum(map(len, batches)):
            return cls(layout=layout, drops=drops)
        places = {(stage, m) for stage, several in enumerate(batches) for m in several}
        return cls(layout=layout, skipped=frozenset(places - present), drops=drops)

    def exists(self, kind: Kind, stage: int, micro_batch: int) -> bool:
        """Returns whether a plan has a resource. The ends of a route have no neighbours. The output
        of a stage is no activation if the next FORWARD is left out. If a FORWARD kept a part of its
        graph, no checkpoint is needed.
        """
        if isinstance(kind, StateKind):
            partial = kind is StateKind.PARTIAL_GRAPH
            return not partial or (stage, micro_batch) in self.drops
        layout = self.layout
        if kind is TensorKind.ACTIVATION:
            inside = 0 <= stage < len(layout.forward) and not layout.is_last_forward(stage)
            return inside and (stage + 1, micro_batch) not in self.skipped
        inside = 0 <= stage < len(layout.backward) and not layout.is_first_backward(stage)
        if kind is TensorKind.GRADIENT:
            return inside
        return inside and (stage, micro_batch) not in self.drops

    def maker(self, resource: Resource) -> tuple[Phase, int]:
        """Returns side and stage of the instruction that makes a tensor, or what is deferred."""
        kind, stage, micro_batch = resource
        if kind is TensorKind.ACTIVATION:
            return Phase.FORWARD, stage
        if kind is not TensorKind.CHECKPOINT:
            return Phase.BACKWARD, stage
        skipped = (self.layout.checkpoint_source(stage), micro_batch) in self.skipped
        return Phase.FORWARD, self.layout.checkpoint_source(stage, skipped=skipped)


def boundary(layout: StageLayout, kind: TensorKind, stage: int) -> int:
    """Returns the block with this tensor as its input, or with this tensor as the gradient of its
    input.
    """
    if kind is TensorKind.ACTIVATION:
        return layout.forward[stage].stop
    return layout.backward[stage].start


PIECE_ELEMENTS = 1 << 22
"""Parameters of a block that are brought to the device at a time, a multiple of 16."""

PIECES = 2
"""Pieces on the device at once: one arrives while the other is computed and leaves."""

_BYTES_IN_PIECE = 28.0
"""Per parameter: fp32 master, two moments, a contribution and the sum of gradients, the weight."""
_BYTES_SHARED = 12.0
"""Per parameter of one piece: an fp32 and an fp64 for intermediate results."""


def staging_bytes(parameters: float) -> float:
    """Returns the most bytes of device memory that UPDATE takes, for blocks with at most
    ``parameters`` parameters.
    """
    return min(parameters, PIECE_ELEMENTS) * (PIECES * _BYTES_IN_PIECE + _BYTES_SHARED)


RESIDENT_BYTES = 16.0
"""Device memory per parameter of a static resident: fp32 master, two moments, and the sum of the
gradients that are not committed yet.
"""


def residents_of(program: Program) -> frozenset[int]:
    """Returns the blocks with state that stays on the device that runs the program."""
    return frozenset(i.block for i in program if isinstance(i, Update) and i.resident)
