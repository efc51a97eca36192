"""Schedules for passes to work on, and what holds after every pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.planner.passes import PASSES
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule, lower, schedule_of
from penstock.planner.schemes import RecomputeMode
from penstock.planner.validate.check import validate


def schedule_for(
    scheme: str,
    devices: int,
    micro_batches: int,
    *,
    recompute: RecomputeMode = "none",
    blocks: int | None = None,
) -> Schedule:
    """A scheme on equal blocks, four a device unless given."""
    request = ScheduleRequest(
        scheme=scheme, num_devices=devices, num_microbatches=micro_batches, recompute=recompute
    )
    return build_schedule(request, [1.0] * (blocks or 4 * devices))


def text(schedule: Schedule, device: int) -> str:
    """A device's order in one line."""
    return " | ".join(map(str, schedule.orders[device]))


def seconds_after_each(
    names: Iterable[str], schedule: Schedule, context: PassContext
) -> Iterator[tuple[str, float]]:
    """Run passes one after the other: name and makespan. Each leaves a valid plan, from which its
    schedule can be read back.
    """
    for name in names:
        schedule = PASSES[name].run(schedule, context)
        plan = lower(schedule)
        validate(plan)
        assert schedule_of(plan).orders == schedule.orders
        yield name, makespan_s(schedule, context)
