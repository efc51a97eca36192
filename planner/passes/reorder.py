"""Ours: take the best order that a search finds, where the schedule's own is not the best.

Not a rule but a search (:mod:`penstock.planner.orders.search`), so for small cases: a few devices
and micro-batches. Which work is done where stays as it is; micro-batches of a stage stay in order.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.layout import ComputeInstruction
from penstock.planner.orders.search import Effort, gap
from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.schedule import Schedule

_EFFORT = Effort(beam_width=16, max_states=20_000, time_limit_s=60.0)
"""States end the search, so that every machine finds the same order."""


def reorder(schedule: Schedule, context: PassContext) -> Schedule:
    """The schedule in the best order found, or as it is if none is faster or if it swaps or updates
    on devices (the search does not place those).

    Raises:
        ConfigError: the schedule itself is over the memory limit.
    """
    if any(not isinstance(i, ComputeInstruction) for order in schedule.orders for i in order):
        return schedule
    found = gap(
        schedule,
        context.costs,
        memory_limit_bytes=context.memory_limit_bytes,
        hop_s=context.hop_s,
        effort=_EFFORT,
    )
    if found.best.makespan_s >= found.makespan_s:
        return schedule
    return replace(schedule, orders=found.best.orders)


PASSES = (
    Pass(
        name="reorder",
        summary="ours: the best order that a search finds (small cases)",
        run=reorder,
    ),
)
