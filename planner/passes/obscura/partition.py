"""Partition adjustment: layers from adjusted to other stages (section 7, Algorithm 1).

Recomputation that the bubbles cannot conceal makes adjusted stages slower than the others. Blocks
move one at a time from the slowest adjusted stage to the fastest other one. They move until both
take the same time by the model of section 7.1. Costs with half layers as blocks give the paper's
granularity. Stages are ranges of consecutive blocks, so a move shifts all stages between the two.

As printed, the algorithm takes back its last move, which overshoots. But if several adjusted stages
are equally slow, only the last of their moves shortens the step. Taking it back leaves the others
without use. So the fastest partition on the way is taken by default.

Three rules go beyond the algorithm as printed. Memory must suffice *with* the moved block (printed:
before, in the stage that takes it). A stage keeps at least one block. The algorithm ends if no
stage can give or take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura.aware import stage_times
from penstock.planner.passes.obscura.memory import Grain, schedule_memory
from penstock.planner.passes.obscura.recompute import execution_times
from penstock.planner.passes.obscura.shape import adjusted_stages
from penstock.planner.schedule.layout import StageLayout
from penstock.planner.schedule.schedule import Schedule
from penstock.protocol.plan.plan import StageRange


def adjust_partition(
    schedule: Schedule, context: PassContext, *, grain: Grain = Grain.STAGE, printed: bool = False
) -> Schedule:
    """Applies Algorithm 1: the orders stay as they are, only the stages' blocks change.

    Returns the fastest of the visited partitions by the model, the one with the fewest moves among
    equals. With ``printed`` it returns the last but one instead, as in line 10 of the algorithm.

    Raises:
        ConfigError: the schedule has no 1F1B shape.
    """
    visited = tuple(partitions(schedule, context, grain))
    if printed:
        return visited[max(len(visited) - 2, 0)]
    return min(visited, key=lambda one: _time_s(one, context))


def partitions(schedule: Schedule, context: PassContext, grain: Grain) -> Iterator[Schedule]:
    """Yields the schedule, and what it becomes move by move until adjusted stages no longer set the
    pace, or no stage can give or take.
    """
    yield schedule
    adjusted = adjusted_stages(schedule)
    if not adjusted or adjusted[-1] + 1 == len(schedule.layout.forward):
        return
    while _is_slower(schedule, context, adjusted[-1]):
        moved = _moved(schedule, context, adjusted[-1], grain)
        if moved is None:
            return
        yield moved
        schedule = moved


def _time_s(schedule: Schedule, context: PassContext) -> float:
    """Returns T_0 in seconds."""
    last = max(adjusted_stages(schedule), default=-1)
    times = stage_times(schedule, context)
    return execution_times(times, schedule.layout.num_microbatches, last)[0]


def _is_slower(schedule: Schedule, context: PassContext, last: int) -> bool:
    """Returns whether T_k - C_adj > T_{k+1}: the adjusted stages set the pace."""
    times = stage_times(schedule, context)
    executed = execution_times(times, schedule.layout.num_microbatches, last)
    pace_s = max(stage.busy_s for stage in times[: last + 1])
    return executed[last] - pace_s > executed[last + 1] * (1.0 + 1e-12)


def _moved(
    schedule: Schedule,
    context: PassContext,
    last: int,
    grain: Grain,
) -> Schedule | None:
    """Moves one block from the slowest adjusted to the fastest other stage; returns ``None`` if
    that is not possible.
    """
    times = stage_times(schedule, context)
    giver = max(range(last + 1), key=lambda s: times[s].busy_s)
    if len(schedule.layout.forward[giver].blocks) == 1:
        return None
    takers = sorted(range(last + 1, len(times)), key=lambda s: times[s].busy_s)
    limit = context.memory_limit_bytes
    for taker in takers:
        moved = replace(schedule, layout=move_block(schedule.layout, giver, taker))
        if limit is None or max(schedule_memory(moved, context.costs, grain)) <= limit:
            return moved
    return None


def move_block(layout: StageLayout, giver: int, taker: int) -> StageLayout:
    """Returns the layout with one block less in an earlier stage and one more in a later one."""
    sizes = [len(stage.blocks) for stage in layout.forward]
    sizes[giver] -= 1
    sizes[taker] += 1
    bounds = pairwise(accumulate(sizes, initial=0))
    stages = tuple(
        StageRange(start=start, stop=stop, device=stage.device)
        for (start, stop), stage in zip(bounds, layout.forward, strict=True)
    )
    return replace(layout, forward=stages, backward=stages)
