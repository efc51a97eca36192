"""Insert OFFLOAD_GRADIENTS: each backward stage's gradients leave right after its last micro-batch.

So the optimizer starts on a stage while the device computes the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.passes.common import after_sends
from penstock.protocol.instructions import Backward, Instruction, OffloadGradients, Program


def insert_gradient_offload(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Programs with transfers -> the same with one offload per backward stage."""
    return tuple(_insert(program) for program in programs)


def _insert(program: Program) -> Program:
    last = {
        instruction.stage: position
        for position, instruction in enumerate(program)
        if isinstance(instruction, Backward)
    }
    offloads = {
        after_sends(program, position): OffloadGradients(stage=stage)
        for stage, position in last.items()
    }
    result: list[Instruction] = []
    for position, instruction in enumerate(program):
        if position in offloads:
            result.append(offloads[position])
        result.append(instruction)
    if len(program) in offloads:
        result.append(offloads[len(program)])
    return tuple(result)
