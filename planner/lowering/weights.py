"""Insert FETCH_WEIGHTS and RELEASE_WEIGHTS.

*Resident*: every stage of a device has a buffer, fetched at the start and released after its last
use.

*Streamed*: two stage-sized buffers, the next stage fetched one ahead. A device works through a
sequence of stages, each for some run of compute instructions. The first two stages are fetched at
the start; when a stage has done its last compute instruction its buffer is released and takes the
stage after the next. A backward pass that directly follows the forward passes of the same blocks
goes on with their buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.planner.layout import ComputeInstruction, StageLayout
from penstock.planner.lowering.common import after_sends
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


def insert_resident_weights(
    layout: StageLayout, programs: Sequence[Program]
) -> tuple[tuple[Program, ...], int]:
    """Programs with transfers and offloads -> the same with weights; the buffers they take."""
    buffers = [_uses(layout, program) for program in programs]
    most = max((len(used) for used in buffers), default=0)
    completed = tuple(
        _insert_resident(program, used) for program, used in zip(programs, buffers, strict=True)
    )
    return completed, max(most, NUM_WEIGHT_BUFFERS)


def _uses(layout: StageLayout, program: Program) -> dict[_Buffer, int]:
    """Where each buffer of a device may be released, in the order of first use."""
    released: dict[_Buffer, int] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, ComputeInstruction):
            stage = instruction.stage
            forward = isinstance(instruction, Forward) or layout.is_coupled(stage)
            buffer = (stage, Phase.FORWARD if forward else Phase.BACKWARD)
            released[buffer] = after_sends(program, position)
    return released


def _insert_resident(program: Program, released: Mapping[_Buffer, int]) -> Program:
    result: list[Instruction] = [
        FetchWeights(stage=stage, phase=phase) for stage, phase in released
    ]
    ends: dict[int, list[_Buffer]] = defaultdict(list)
    for buffer, position in released.items():
        ends[position].append(buffer)
    for position in range(len(program) + 1):
        result += [ReleaseWeights(stage=stage, phase=phase) for stage, phase in ends[position]]
        result += program[position : position + 1]
    return tuple(result)


def insert_streamed_weights(
    layout: StageLayout, programs: Sequence[Program]
) -> tuple[tuple[Program, ...], int]:
    """Programs with transfers and offloads -> the same with weights; the buffers they take.

    A stage that is taken up again after two others is fetched again.
    """
    return tuple(_insert_streamed(layout, program) for program in programs), NUM_WEIGHT_BUFFERS


def _insert_streamed(layout: StageLayout, program: Program) -> Program:
    runs = _runs(layout, program)
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
