"""Insert FETCH_WEIGHTS and RELEASE_WEIGHTS: two stage-sized buffers, the next stage fetched one
ahead.

A device works through a sequence of stages, each for some run of compute instructions. The first
two stages are fetched at the start; when a stage has done its last compute instruction its buffer
is released and takes the stage after the next. A backward pass that directly follows the forward
passes of the same blocks goes on with their buffer: so GPipe and 1F1B fetch once an attempt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.planner.layout import ComputeInstruction, StageLayout
from penstock.planner.passes.common import after_sends
from penstock.protocol.instructions import (
    FetchWeights,
    Forward,
    Instruction,
    Phase,
    Program,
    ReleaseWeights,
)

NUM_WEIGHT_BUFFERS = 2
"""Stage-sized weight buffers of a device: one in use, one arriving."""

_Buffer = tuple[int, Phase]


@dataclass(slots=True, kw_only=True)
class _Run:
    """Consecutive compute instructions that use one buffer; ``end`` is where it may be released."""

    buffer: _Buffer
    end: int


def insert_weights(layout: StageLayout, programs: Sequence[Program]) -> tuple[Program, ...]:
    """Programs with transfers and offloads -> the same with weights.

    Raises: ValueError: a stage is taken up again after another one; such a scheme needs a pass of
        its own.
    """
    return tuple(_insert(layout, program) for program in programs)


def _insert(layout: StageLayout, program: Program) -> Program:
    runs = _runs(layout, program)
    buffers = [run.buffer for run in runs]
    if len(set(buffers)) != len(buffers):
        raise ValueError(f"stages are not computed one after the other: {buffers}")
    insertions: dict[int, list[Instruction]] = defaultdict(list)
    for index, run in enumerate(runs):
        fetch_at = runs[index - NUM_WEIGHT_BUFFERS].end if index >= NUM_WEIGHT_BUFFERS else 0
        insertions[fetch_at].append(FetchWeights(stage=run.buffer[0], phase=run.buffer[1]))
        # A release precedes the fetch at the same place: it is inserted there by an earlier run.
        insertions[run.end].append(ReleaseWeights(stage=run.buffer[0], phase=run.buffer[1]))
    result: list[Instruction] = []
    for position in range(len(program) + 1):
        result += insertions[position]
        result += program[position : position + 1]
    return tuple(result)


def _runs(layout: StageLayout, program: Program) -> list[_Run]:
    runs: list[_Run] = []
    for position, instruction in enumerate(program):
        if isinstance(instruction, ComputeInstruction):
            previous = runs[-1].buffer if runs else None
            buffer = _buffer_of(layout, instruction, previous)
            if buffer != previous:
                runs.append(_Run(buffer=buffer, end=0))
            runs[-1].end = after_sends(program, position)
    return runs


def _buffer_of(
    layout: StageLayout, instruction: ComputeInstruction, previous: _Buffer | None
) -> _Buffer:
    stage = instruction.stage
    shared = (stage, Phase.FORWARD)
    if isinstance(instruction, Forward) or (layout.is_coupled(stage) and previous == shared):
        return shared
    return stage, Phase.BACKWARD
