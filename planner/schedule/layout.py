"""Layouts of schedules, which exist before programs: stages, devices, orders, balanced cuts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate, pairwise

from penstock.host.sums import added
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.layout import StageLayout

__all__ = [
    "ComputeInstruction",
    "Order",
    "OrderedInstruction",
    "Residency",
    "StageLayout",
    "partition",
]

ComputeInstruction = Forward | Recompute | Backward | BackwardInput | BackwardWeight
"""Instructions that occupy the compute stream of a device."""

OrderedInstruction = ComputeInstruction | SwapOut | SwapIn | Update
"""Instructions that schemes and passes order; lowering inserts all others around them."""

Order = tuple[OrderedInstruction, ...]
"""The ordered instructions of one device."""


class Residency(StrEnum):
    """The place of the weights of a device's stages during an attempt."""

    RESIDENT = "resident"
    """The device has one buffer for each of its stages, fetched once."""
    STREAMED = "streamed"
    """Host memory has them; the device has two stage-sized buffers, one in use, one arriving."""


_RESOLUTION = 2**40
"""Costs are compared as integers in units of 1/_RESOLUTION of the total, so that ties are exact."""


def partition(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cuts ``costs`` into ``num_stages`` non-empty contiguous ranges.

    The largest stage cost is as small as possible. Among those cuts the sum of squared stage costs
    is, so that one heavy block does not leave the rest unbalanced. Among those the earlier stages
    are smaller.

    Raises:
        ValueError: more stages than blocks, or fewer than one stage.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} blocks into {num_stages} stages")
    total = added(costs) or 1.0
    ends = [0, *accumulate(round(cost / total * _RESOLUTION) for cost in costs)]
    return _least_squares(ends, num_stages, _smallest_maximum(ends, num_stages))


def _smallest_maximum(ends: Sequence[int], num_stages: int) -> int:
    """Returns the smallest possible cost of the most expensive stage. ``ends``: cumulated costs,
    from 0.
    """
    low = max(later - earlier for earlier, later in pairwise(ends))
    low, high = max(low, -(-ends[-1] // num_stages)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(ends, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(ends: Sequence[int], maximum: int) -> int:
    """Returns the number of stages of at most ``maximum`` each, filled from the front; no block
    costs more.
    """
    stages, done = 0, 0
    while done < len(ends) - 1:
        done = bisect_right(ends, ends[done] + maximum) - 1
        stages += 1
    return stages


def _least_squares(ends: Sequence[int], num_stages: int, maximum: int) -> tuple[range, ...]:
    """Returns the cut with stage costs up to ``maximum`` and the least sum of squares; earlier
    stages smaller.
    """
    num_blocks = len(ends) - 1
    unreachable = num_blocks * ends[-1] ** 2 + 1
    best = [unreachable] * num_blocks + [0]
    cuts: list[list[int]] = []
    for _ in range(num_stages):
        following, best = best, [unreachable] * (num_blocks + 1)
        cut = [0] * (num_blocks + 1)
        for i in range(num_blocks):
            for j in range(i + 1, num_blocks + 1):
                first = ends[j] - ends[i]
                if first > maximum:
                    break
                if following[j] + first**2 < best[i]:
                    best[i], cut[i] = following[j] + first**2, j
        cuts.append(cut)
    stages: list[range] = []
    start = 0
    for cut in reversed(cuts):
        stages.append(range(start, cut[start]))
        start = cut[start]
    return tuple(stages)
