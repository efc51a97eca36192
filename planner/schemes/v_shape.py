"""The common part of V-shaped zero-bubble schemes: two chunks per device, instructions by counting.

Device d has stage d on the way down (chunk 0) and stage 2 p - 1 - d on the way up (chunk 1). So the
loss is on the device that reads the batch. Such schemes are written as a sequence of *moves*: the
next action with one of the chunks. The n-th time that a move occurs it means micro-batch n of that
chunk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from enum import Enum, auto

from penstock.planner.schedule.layout import ComputeInstruction, Order, StageLayout
from penstock.planner.schemes.base import Recomputation, backward_weight


class Move(Enum):
    """The next action of a device. DOWN is its first chunk, UP its second."""

    FORWARD_DOWN = auto()
    FORWARD_UP = auto()
    BACKWARD_DOWN = auto()
    BACKWARD_UP = auto()
    INPUT_DOWN = auto()
    INPUT_UP = auto()
    WEIGHT_DOWN = auto()
    WEIGHT_UP = auto()
    OLDEST_WEIGHT = auto()
    """The weight half of whichever input half has waited longest."""


_UP = {Move.FORWARD_UP, Move.BACKWARD_UP, Move.INPUT_UP, Move.WEIGHT_UP}
_WHOLE = {Move.INPUT_DOWN: Move.BACKWARD_DOWN, Move.INPUT_UP: Move.BACKWARD_UP}


def order_of_moves(
    layout: StageLayout, device: int, moves: Iterable[Move], recompute: Recomputation
) -> Order:
    """Returns the instructions that moves of a device mean; micro-batches beyond the last are left
    out.
    """
    return tuple(
        instruction
        for move, stage, micro_batch in _numbered(layout, device, moves)
        if micro_batch < layout.num_microbatches
        for instruction in _instructions(move, stage, micro_batch, recompute)
    )


def _numbered(
    layout: StageLayout, device: int, moves: Iterable[Move]
) -> Iterator[tuple[Move, int, int]]:
    done: Counter[Move] = Counter()
    pending: deque[tuple[int, int]] = deque()
    for move in moves:
        if move is Move.OLDEST_WEIGHT:
            yield move, *pending.popleft()
            continue
        # A whole backward counts as an input half: both take the next micro-batch.
        counted = _WHOLE.get(move, move)
        stage = len(layout.forward) - 1 - device if move in _UP else device
        if move in _WHOLE:
            pending.append((stage, done[counted]))
        yield move, stage, done[counted]
        done[counted] += 1


def _instructions(
    move: Move, stage: int, micro_batch: int, recompute: Recomputation
) -> Iterable[ComputeInstruction]:
    match move:
        case Move.FORWARD_DOWN | Move.FORWARD_UP:
            return (recompute.forward(stage, micro_batch),)
        case Move.BACKWARD_DOWN | Move.BACKWARD_UP:
            return recompute.backward(stage, micro_batch)
        case Move.INPUT_DOWN | Move.INPUT_UP:
            return recompute.backward_input(stage, micro_batch)
        case _:
            return (backward_weight(stage, micro_batch),)
