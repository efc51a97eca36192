"""Insert OFFLOAD_GRADIENTS: a backward stage's gradients leave right after they are final.

That is after its last BACKWARD or BACKWARD_WEIGHT, so that the optimizer starts on a stage while
the device computes the next one. Data-parallel gradients are reduced first. Optimizer updates on
the device wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.plan.instructions import (
    Instruction,
    OffloadGradients,
    Program,
    ReduceGradients,
)
from penstock.protocol.plan.resources import StateKind
from penstock.protocol.plan.semantics import Lane, classes, makers

_SUMMING = makers(StateKind.SUMS)
_FOLLOWERS = classes(lambda row: row.lane in (Lane.LINK, Lane.REDUCE, Lane.OFFLOAD))


def after_sends(program: Program, position: int) -> int:
    """Returns the first position behind ``position`` and the sends and offloads that follow it.

    Peers wait for sends and the optimizer for offloads, so nothing is put in front of them.
    """
    position += 1
    while position < len(program) and isinstance(program[position], _FOLLOWERS):
        position += 1
    return position


def insert_gradient_offload(
    programs: Sequence[Program], *, reduces_gradients: bool
) -> tuple[Program, ...]:
    """Returns programs, which have transfers, with one offload per backward stage."""
    return tuple(_insert(program, reduces_gradients) for program in programs)


def _insert(program: Program, reduces_gradients: bool) -> Program:
    last = {
        instruction.stage: position
        for position, instruction in enumerate(program)
        if isinstance(instruction, _SUMMING)
    }
    stages = {after_sends(program, position): stage for stage, position in last.items()}
    result: list[Instruction] = []
    for position in range(len(program) + 1):
        if position in stages:
            if reduces_gradients:
                result.append(ReduceGradients(stage=stages[position]))
            result.append(OffloadGradients(stage=stages[position]))
        result += program[position : position + 1]
    return tuple(result)
