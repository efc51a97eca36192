"""The meaning of instructions: one row for each opcode, from which planner and workers derive the
rest.

A row names the lane of an instruction on its device, the list that numbers its stage, the resources
that it reads and makes, and its use of weights. **Resources** are tensors in the memory of the
device, named by kind, stage and micro-batch. The costs know bytes and seconds; rows do not.
:mod:`penstock.planner.validate` checks the order of instructions by separate rules.

An UPDATE reads and writes host memory, and so do copies of weights and gradients at their other
end; this memory is no resource.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.protocol.plan.instructions import (
    INSTRUCTIONS,
    Forward,
    Instruction,
    Keep,
    Opcode,
    Phase,
    Recompute,
    RecomputeAfter,
    by_opcode,
)
from penstock.protocol.plan.resources import ALL, Kind, PlanFacts, Resource, StateKind, TensorKind


class Lane(StrEnum):
    """A part of a device, or of a node, that serves one piece of work at a time."""

    COMPUTE = "compute"
    """The compute stream of a device."""
    FETCH = "fetch"
    """Its host-to-device stream: weights, and optimizer state of updates."""
    OFFLOAD = "offload"
    """Its device-to-host stream: gradients, and weights of updates."""
    SWAP = "swap"
    """Activations on either of these streams, or on the way to another device's memory."""
    LINK = "link"
    """Transfers from one device to another."""
    REDUCE = "reduce"
    """Collectives of a device: sums of gradients, gathered weights, gradients from other nodes."""
    UPDATE = "update"
    """Optimizer kernels on the compute stream of a device."""
    OPTIMIZER = "optimizer"
    """The optimizer cores of a node."""


class WeightUse(StrEnum):
    """Use of a weight buffer by an instruction."""

    FETCHES = "fetches"
    READS = "reads"
    """Reads the buffer of its stage; a backward can also read that of the forward stage with the
    same blocks.
    """
    RELEASES = "releases"


Condition = Callable[[Any, PlanFacts], bool]
Stages = Callable[[Any, PlanFacts], Iterable[int]]


class Read(NamedTuple):
    """A kind of resource that an instruction cannot start without, if the resource exists.

    ``step``: distance of the resource's stage from the instruction's. ``stays``: another
    instruction takes the resource later; otherwise it is freed when the instruction has run.
    ``when``: instructions that read it.
    """

    kind: Kind
    step: int = 0
    stays: bool = False
    when: Condition | None = None


def _own(instruction: Any, facts: PlanFacts) -> Iterable[int]:
    """Returns the instruction's own stage."""
    return (instruction.stage,)


class Made(NamedTuple):
    """A kind of resource that is there when an instruction has run, for these stages."""

    kind: Kind
    stages: Stages = _own


def _following(forward: Forward, facts: PlanFacts) -> Iterable[int]:
    """Returns the backward stage that takes the output as its checkpoint, because the next FORWARD
    is left out.
    """
    if (forward.stage + 1, forward.micro_batch) not in facts.skipped:
        return ()
    following = facts.layout.checkpoint_after(forward.stage)
    return () if following is None else (following,)


def _inside(forward: Forward, facts: PlanFacts) -> Iterable[int]:
    """Returns backward stages that start inside the stage, the one that runs first in front."""
    return (
        reversed(facts.layout.checkpoints_of(forward.stage)) if forward.keep is Keep.INPUT else ()
    )


def _if_kept(keep: Keep) -> Stages:
    return lambda forward, facts: _own(forward, facts) if forward.keep is keep else ()


def _after_gradient(recompute: Recompute, facts: PlanFacts) -> bool:
    return recompute.after is RecomputeAfter.GRADIENT


def _kept_whole(swap: Any, facts: PlanFacts) -> bool:
    return (swap.stage, swap.micro_batch) not in facts.drops


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionRow:
    """Describes an opcode.

    ``lane``: ``None`` if the instruction occupies none. ``side``: the list that numbers its stage,
    if it has a stage; ``None`` if the instruction has the side. ``makes``: in the order in which
    tensors are sent.
    """

    lane: Lane | None
    side: Phase | None
    reads: tuple[Read, ...] = ()
    makes: tuple[Made, ...] = ()
    weights: WeightUse | None = None


_ACTIVATION, _GRADIENT, _CHECKPOINT = TensorKind
_KEPT = (
    Read(StateKind.PARTIAL_GRAPH, stays=True),
    Read(StateKind.GRAPH, stays=True, when=_kept_whole),
)
_INTO_BACKWARD = (Read(StateKind.GRAPH), Read(_GRADIENT, step=1))


def _sends(side: Phase, kind: TensorKind) -> InstructionRow:
    return InstructionRow(lane=Lane.LINK, side=side, reads=(Read(kind),))


def _receives(side: Phase, kind: TensorKind) -> InstructionRow:
    return InstructionRow(lane=None, side=side, makes=(Made(kind),))


SEMANTICS: Mapping[Opcode, InstructionRow] = by_opcode(
    "row",
    {
        Opcode.FORWARD: InstructionRow(
            lane=Lane.COMPUTE,
            side=Phase.FORWARD,
            reads=(Read(_ACTIVATION, step=-1),),
            makes=(
                Made(_ACTIVATION),
                Made(_CHECKPOINT, _following),
                Made(_CHECKPOINT, _inside),
                Made(StateKind.GRAPH, _if_kept(Keep.ALL)),
                Made(StateKind.PARTIAL_GRAPH, _if_kept(Keep.SELECTIVE)),
            ),
            weights=WeightUse.READS,
        ),
        Opcode.RECOMPUTE: InstructionRow(
            lane=Lane.COMPUTE,
            side=Phase.BACKWARD,
            reads=(
                Read(StateKind.PARTIAL_GRAPH),
                Read(_CHECKPOINT),
                Read(_GRADIENT, step=1, stays=True, when=_after_gradient),
            ),
            makes=(Made(StateKind.GRAPH),),
            weights=WeightUse.READS,
        ),
        Opcode.BACKWARD: InstructionRow(
            lane=Lane.COMPUTE,
            side=Phase.BACKWARD,
            reads=_INTO_BACKWARD,
            makes=(Made(_GRADIENT), Made(StateKind.SUMS)),
            weights=WeightUse.READS,
        ),
        Opcode.BACKWARD_INPUT: InstructionRow(
            lane=Lane.COMPUTE,
            side=Phase.BACKWARD,
            reads=_INTO_BACKWARD,
            makes=(Made(_GRADIENT), Made(StateKind.DEFERRED)),
            weights=WeightUse.READS,
        ),
        Opcode.BACKWARD_WEIGHT: InstructionRow(
            lane=Lane.COMPUTE,
            side=Phase.BACKWARD,
            reads=(Read(StateKind.DEFERRED),),
            makes=(Made(StateKind.SUMS),),
        ),
        Opcode.SEND_ACTIVATION: _sends(Phase.FORWARD, _ACTIVATION),
        Opcode.RECV_ACTIVATION: _receives(Phase.FORWARD, _ACTIVATION),
        Opcode.SEND_GRADIENT: _sends(Phase.BACKWARD, _GRADIENT),
        Opcode.RECV_GRADIENT: _receives(Phase.BACKWARD, _GRADIENT),
        Opcode.SEND_CHECKPOINT: _sends(Phase.BACKWARD, _CHECKPOINT),
        Opcode.RECV_CHECKPOINT: _receives(Phase.BACKWARD, _CHECKPOINT),
        Opcode.FETCH_WEIGHTS: InstructionRow(lane=Lane.FETCH, side=None, weights=WeightUse.FETCHES),
        Opcode.RELEASE_WEIGHTS: InstructionRow(lane=None, side=None, weights=WeightUse.RELEASES),
        Opcode.OFFLOAD_GRADIENTS: InstructionRow(
            lane=Lane.OFFLOAD, side=Phase.BACKWARD, reads=(Read(StateKind.SUMS),)
        ),
        Opcode.SWAP_OUT: InstructionRow(
            lane=Lane.SWAP, side=Phase.FORWARD, reads=_KEPT, makes=(Made(StateKind.SWAPPED),)
        ),
        Opcode.SWAP_IN: InstructionRow(
            lane=Lane.SWAP, side=Phase.FORWARD, reads=(*_KEPT, Read(StateKind.SWAPPED))
        ),
        Opcode.UPDATE: InstructionRow(lane=Lane.UPDATE, side=None),
        Opcode.REDUCE_GRADIENTS: InstructionRow(
            lane=Lane.REDUCE, side=Phase.BACKWARD, reads=(Read(StateKind.SUMS, stays=True),)
        ),
    },
)
"""The table. Each row is held against what the validator and the tests say of the instruction."""


def row_of(instruction: Instruction) -> InstructionRow:
    """Returns the row of an instruction."""
    return SEMANTICS[instruction.opcode]


def reads(instruction: Any, facts: PlanFacts) -> Iterator[Resource]:
    """Yields the resources that an instruction cannot start without, in the order of its row."""
    return _read(instruction, facts, SEMANTICS[instruction.opcode].reads)


def takes(instruction: Any, facts: PlanFacts) -> Iterator[Resource]:
    """Yields resources that an instruction reads and frees."""
    rules = SEMANTICS[instruction.opcode].reads
    return _read(instruction, facts, [read for read in rules if not read.stays])


def _read(instruction: Any, facts: PlanFacts, rules: Iterable[Read]) -> Iterator[Resource]:
    exists = facts.exists
    for kind, step, _, when in rules:
        if when is None or when(instruction, facts):
            stage = instruction.stage + step
            for micro_batch in _micro_batches(instruction):
                if exists(kind, stage, micro_batch):
                    yield Resource(kind, stage, micro_batch)


def makes(instruction: Any, facts: PlanFacts) -> Iterator[Resource]:
    """Yields the resources that exist after an instruction (for a RECV: after the tensor's
    arrival).
    """
    exists, batches = facts.exists, _micro_batches(instruction)
    for kind, stages in SEMANTICS[instruction.opcode].makes:
        for stage in stages(instruction, facts):
            if kind is StateKind.SUMS:
                yield Resource(kind, stage, ALL)
                continue
            for micro_batch in batches:
                if isinstance(kind, StateKind) or exists(kind, stage, micro_batch):
                    yield Resource(kind, stage, micro_batch)


def _micro_batches(instruction: Any) -> tuple[int, ...]:
    try:
        return (instruction.micro_batch,)
    except AttributeError:  # most have one, and this is asked of every instruction of a plan
        batches: tuple[int, ...] = getattr(instruction, "micro_batches", (ALL,))
        return batches


def side_of(instruction: Any) -> Phase:
    """Returns the list that numbers an instruction's stage; an UPDATE has none."""
    side: Phase = SEMANTICS[instruction.opcode].side or instruction.phase
    return side


def _is_send(row: InstructionRow) -> bool:
    return row.lane is Lane.LINK


def _is_receive(row: InstructionRow) -> bool:
    return row.lane is None and bool(row.makes)


def classes(condition: Callable[[InstructionRow], bool]) -> tuple[type[Any], ...]:
    """Returns the classes with rows that meet a condition, in the order of opcodes."""
    return tuple(cls for cls in INSTRUCTIONS if condition(SEMANTICS[cls.opcode]))


def readers(kind: Kind) -> tuple[type[Any], ...]:
    """Returns the classes that read a kind of resource."""
    return classes(lambda row: any(read.kind is kind for read in row.reads))


def takers(kind: Kind) -> tuple[type[Any], ...]:
    """Returns the classes that read a kind of resource and free it."""
    return classes(lambda row: any(read.kind is kind and not read.stays for read in row.reads))


def makers(kind: Kind) -> tuple[type[Any], ...]:
    """Returns the classes that make a kind of resource."""
    return classes(lambda row: any(made.kind is kind for made in row.makes))


GRAPHS = frozenset({StateKind.GRAPH, StateKind.PARTIAL_GRAPH})
"""Graphs, which contain the tensors that their maker takes: these tensors are not freed."""

COMPUTES = classes(lambda row: row.lane is Lane.COMPUTE)
"""Instructions on the compute stream of a device."""

READS_WEIGHTS = classes(lambda row: row.weights is WeightUse.READS)
"""Instructions that compute with the weights of their stage."""

SENDS: Mapping[TensorKind, type[Any]] = MappingProxyType(
    {TensorKind(SEMANTICS[c.opcode].reads[0].kind): c for c in classes(_is_send)}
)
"""Instructions that send each kind of tensor."""

RECEIVES: Mapping[TensorKind, type[Any]] = MappingProxyType(
    {TensorKind(SEMANTICS[c.opcode].makes[0].kind): c for c in classes(_is_receive)}
)
"""Instructions that post the receive of each kind of tensor."""
