"""Inserts FETCH_WEIGHTS and RELEASE_WEIGHTS.

*Resident*: every stage of a device has a buffer, fetched at the start and released after its last
use.

*Streamed*: two stage-sized buffers, the next stage fetched one ahead. A device works through a
sequence of stages, each for some run of compute instructions. The first two stages are fetched at
the start. When a run has done its last compute instruction, its buffer is released and takes the
stage of the run after the next. If the buffer has that stage, it keeps it: two stages in turns are
fetched once. Forward and backward of the same blocks under the same stage number share a buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.planner.schedule.layout import ComputeInstruction, StageLayout
from penstock.planner.schedule.lowering.transfers import after_sends
from penstock.protocol.plan.instructions import (
    FetchWeights,
    Instruction,
    Phase,
    Program,
    ReleaseWeights,
)
from penstock.protocol.plan.semantics import READS_WEIGHTS, side_of

NUM_WEIGHT_BUFFERS = 2
"""Stage-sized weight buffers of a device: one in use, one arriving."""

_Buffer = tuple[int, Phase]


@dataclass(slots=True, kw_only=True)
class _Run:
    """Consecutive compute instructions with the same weights.

    ``side``: forward stage or not; ``None`` where forward and backward stage are the same.
    ``forward``: one of the instructions is a FORWARD. ``end``: where the run has ended.
    """

    stage: int
    side: bool | None
    forward: bool = False
    end: int = 0


@dataclass(slots=True, kw_only=True)
class _Stay:
    """Weights in a buffer, from the position of their fetch to that of their release."""

    stage: int
    begin: int
    end: int
    forward: bool

    @property
    def buffer(self) -> _Buffer:
        """A FORWARD needs the forward stage's weights, which serve a backward as well."""
        return self.stage, Phase.FORWARD if self.forward else Phase.BACKWARD


def insert_resident_weights(
    layout: StageLayout, programs: Sequence[Program]
) -> tuple[tuple[Program, ...], int]:
    """Returns programs, which have transfers and offloads, with weights; and how many buffers a
    device needs at most.
    """
    buffers = [_uses(layout, program) for program in programs]
    most = max((len(used) for used in buffers), default=0)
    completed = tuple(
        _insert_resident(program, used) for program, used in zip(programs, buffers, strict=True)
    )
    return completed, max(most, NUM_WEIGHT_BUFFERS)


def _uses(layout: StageLayout, program: Program) -> dict[_Buffer, int]:
    """Returns where each buffer of a device may be released, in the order of first use."""
    released: dict[_Buffer, int] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, ComputeInstruction):
            stage = instruction.stage
            phase = Phase.FORWARD if layout.is_coupled(stage) else side_of(instruction)
            released[stage, phase] = after_sends(program, position)
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
    """Returns programs, which have transfers and offloads, with weights; and how many buffers a
    device needs at most.
    """
    return tuple(_insert_streamed(layout, program) for program in programs), NUM_WEIGHT_BUFFERS


def _insert_streamed(layout: StageLayout, program: Program) -> Program:
    fetches: dict[int, list[Instruction]] = defaultdict(list)
    releases: dict[int, list[Instruction]] = defaultdict(list)
    for stay in _stays(_runs(layout, program)):
        stage, phase = stay.buffer
        fetches[stay.begin].append(FetchWeights(stage=stage, phase=phase))
        releases[stay.end].append(ReleaseWeights(stage=stage, phase=phase))
    result: list[Instruction] = []
    for position in range(len(program) + 1):
        if position in releases:
            result += releases[position]
        if position in fetches:
            result += fetches[position]
        result += program[position : position + 1]
    return tuple(result)


def _runs(layout: StageLayout, program: Program) -> list[_Run]:
    runs: list[_Run] = []
    for position, instruction in enumerate(program):
        if isinstance(instruction, READS_WEIGHTS):
            stage = instruction.stage
            forward = side_of(instruction) is Phase.FORWARD
            side = None if layout.is_coupled(stage) else forward
            if not runs or (runs[-1].stage, runs[-1].side) != (stage, side):
                runs.append(_Run(stage=stage, side=side))
            runs[-1].end = after_sends(program, position)
            runs[-1].forward = runs[-1].forward or forward
    return runs


def _stays(runs: Sequence[_Run]) -> list[_Stay]:
    """Returns when each buffer is taken and given back, in the order of first use.

    While a run computes, the weights of the next one arrive. So the other buffer takes those of the
    run after the next, unless it has them.
    """
    stays: list[_Stay] = []
    current: list[_Stay] = []
    for index, run in enumerate(runs):
        if index >= NUM_WEIGHT_BUFFERS:
            before = runs[index - NUM_WEIGHT_BUFFERS]
            stay = current[index - NUM_WEIGHT_BUFFERS]
            if (before.stage, before.side) == (run.stage, run.side):
                stay.end, stay.forward = run.end, stay.forward or run.forward
                current.append(stay)
                continue
            begin = before.end
        else:
            begin = 0
        stay = _Stay(stage=run.stage, begin=begin, end=run.end, forward=run.forward)
        stays.append(stay)
        current.append(stay)
    return stays
