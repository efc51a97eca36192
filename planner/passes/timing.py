"""When compute instructions run under unit costs: used to match receives to sends, not to predict
time.

A block costs 1 in FORWARD and RECOMPUTE and 2 in BACKWARD; transfers and weights cost nothing. Real
costs are :mod:`penstock.planner.simulate`'s matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.planner.layout import ComputeInstruction, Order, StageLayout
from penstock.protocol.instructions import Backward, Forward, Opcode, Recompute

_Key = tuple[Opcode, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """``starts[d][i]`` and ``ends[d][i]`` of compute instruction ``i`` of device ``d``."""

    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]


def unit_times(layout: StageLayout, orders: Sequence[Order]) -> UnitTimes:
    """Earliest times of compute-only orders.

    Raises: ValueError: the orders cannot finish: an instruction waits for one that never runs
        before it.
    """
    ended: dict[_Key, int] = {}
    starts: list[list[int]] = [[] for _ in orders]
    ends: list[list[int]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while len(ends[device]) < len(order):
                instruction = order[len(ends[device])]
                needs = tuple(_needs(layout, instruction))
                if any(key not in ended for key in needs):
                    break
                start = max([ends[device][-1] if ends[device] else 0, *(ended[k] for k in needs)])
                starts[device].append(start)
                ends[device].append(start + _cost(layout, instruction))
                ended[_key(instruction)] = ends[device][-1]
                moved = True
    if any(len(done) < len(order) for done, order in zip(ends, orders, strict=True)):
        raise ValueError("compute orders wait for each other in a circle, or for work nobody does")
    return UnitTimes(starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))


def _key(instruction: ComputeInstruction) -> _Key:
    return instruction.opcode, instruction.stage, instruction.micro_batch


def _needs(layout: StageLayout, instruction: ComputeInstruction) -> Iterable[_Key]:
    match instruction:
        case Forward(stage=s, micro_batch=m) if s > 0:
            yield Opcode.FORWARD, s - 1, m
        case Recompute(stage=b, micro_batch=m) if b > 0:
            yield Opcode.FORWARD, layout.checkpoint_source(b), m
        case Backward(stage=b, micro_batch=m) if b < len(layout.backward) - 1:
            yield Opcode.BACKWARD, b + 1, m


def _cost(layout: StageLayout, instruction: ComputeInstruction) -> int:
    match instruction:
        case Forward(stage=s):
            return len(layout.forward[s].blocks)
        case Recompute(stage=b):
            return len(layout.backward[b].blocks)
        case Backward(stage=b):
            return 2 * len(layout.backward[b].blocks)
