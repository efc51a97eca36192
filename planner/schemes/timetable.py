"""Schemes that are a timetable: every forward and backward has a slot, no two on a device the same.

Micro-batch k of a unit enters its route 2 k slots after the unit starts. It moves on by one stage a
slot, forward through S stages and back. So forward (s, k) has slot ``s + 2 k``, backward (s, k) has
``2 S - 1 - s + 2 k``. A device must have stages of both parities, half of each. A bidirectional
pair of pipelines has them (Chimera, s and p - 1 - s, p even). A wave has them, too (Hanayo, s and 2
p - 1 - s). Then forwards of one kind and backwards of the other use the even slots, the rest the
odd ones. A unit keeps a device busy for ``2 * stages per device * micro-batches per route`` slots.
The next unit starts after as many: its first forwards fill the slots that the last backwards leave
free. The Chimera paper calls this "direct concatenation" (section 3.5).

The orders are those of equal forward and backward times; with other times they stay the same.
"""

from __future__ import annotations

from penstock.planner.schedule.layout import ComputeInstruction, Order, StageLayout
from penstock.planner.schemes.base import Recomputation


def timetable_orders(
    layout: StageLayout, recompute: Recomputation, *, microbatches_per_unit: int
) -> tuple[Order, ...]:
    """Returns the orders of all devices. ``microbatches_per_unit`` counts those of one route."""
    slots: list[list[tuple[int, tuple[ComputeInstruction, ...]]]] = [
        [] for _ in range(layout.num_devices)
    ]
    stages_per_route = len(layout.forward) // layout.num_routes
    period = 2 * len(layout.forward) * microbatches_per_unit // layout.num_devices
    for stage, placed in enumerate(layout.forward):
        depth = stage % stages_per_route
        for index, m in enumerate(layout.microbatches_of_route[layout.forward_routes[stage]]):
            unit, position = divmod(index, microbatches_per_unit)
            start = unit * period + 2 * position
            down, back = start + depth, start + 2 * stages_per_route - 1 - depth
            slots[placed.device].append((down, (recompute.forward(stage, m),)))
            slots[placed.device].append((back, tuple(recompute.backward(stage, m))))
    return tuple(
        tuple(instruction for _, group in sorted(timed, key=_slot) for instruction in group)
        for timed in slots
    )


def _slot(timed: tuple[int, tuple[ComputeInstruction, ...]]) -> int:
    return timed[0]
