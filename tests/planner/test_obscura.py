"""Obscura's transformation of 1F1B: bubbles, orders and times, exact with f = 1 and b = 2."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.papers.obscura.units import (
    converted_bubbles,
    overhead,
    recomputing,
    seconds,
    unit_context,
    unit_schedule,
)
from penstock.host.errors import ConfigError
from penstock.planner.passes import PASSES
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura.migrate import (
    identify,
    identify_cost_effective,
    migrate_forwards,
    refine_migration,
    relax_dependencies,
)
from penstock.planner.passes.obscura.recompute import StageTimes, execution_times
from penstock.planner.passes.obscura.shape import (
    NONE,
    Bubbles,
    adjusted_stages,
    bubbles,
    stage_orders,
    with_orders,
)
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schedule.timing import order_times
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import Forward, Keep


def _text(schedule: Schedule, stage: int) -> str:
    """An order as ``F0 F1 B0 …``, recomputation left out."""
    codes = {"F": "F", "B": "B"}
    return " ".join(
        f"{codes[i.opcode.value]}{i.micro_batch}"  # type: ignore[union-attr]
        for i in schedule.orders[stage]
        if i.opcode.value in codes
    )


def _transformed(schedule: Schedule, context: PassContext) -> Schedule:
    for step in (migrate_forwards, relax_dependencies, refine_migration):
        schedule = step(schedule, context)
    return schedule


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 4), (4, 12), (8, 32)])
def test_bubbles_of_1f1b(num_stages: int, num_microbatches: int) -> None:
    """Section 3.1: 2 (p - s - 1) forward and p - s - 1 backward bubbles."""
    schedule, context = unit_schedule(num_stages, num_microbatches), unit_context(num_stages)
    times = order_times(schedule.layout, schedule.orders, context.costs)
    assert [bubbles(schedule, times, stage) for stage in range(num_stages)] == [
        Bubbles(forward_s=2.0 * later, backward_s=float(later))
        for later in reversed(range(num_stages))
    ]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(4, 4), (4, 8), (4, 12), (8, 8), (8, 12), (8, 32)]
)
def test_bubbles_after_migration(num_stages: int, num_microbatches: int) -> None:
    """Section 5.3: up to min(m - 1, 3 (p - s - 1)) backward bubbles, reached for m >= p."""
    schedule, context = unit_schedule(num_stages, num_microbatches), unit_context(num_stages)
    for stage in range(num_stages):
        expected = min(num_microbatches - 1, 3 * (num_stages - stage - 1))
        assert converted_bubbles(schedule, context, stage) == expected


def test_recomputation_on_demand_and_strawman() -> None:
    """Figure 5 says 19, 25, 33 and 8, 17 percent for an unknown number of micro-batches."""
    context = unit_context(4)
    added = [overhead(last, 12, context, early=False) for last in (0, 1, 3)]
    early = [overhead(last, 12, context, early=True) for last in (0, 1)]
    assert added == pytest.approx([9 / 45, 11 / 45, 15 / 45])
    assert early == pytest.approx([3 / 45, 7 / 45])


def test_migrated_relaxed_refined_orders() -> None:
    """p = 4, m = 8, stages 0 and 1 adjusted (figures 6 and 9)."""
    context = unit_context(4)
    start = recomputing(unit_schedule(4, 8), 1)
    assert _text(start, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    migrated = migrate_forwards(start, context)
    assert [_text(migrated, stage) for stage in (0, 1, 2)] == [
        "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
    ]
    relaxed = relax_dependencies(migrated, context)
    assert [_text(relaxed, stage) for stage in (0, 1)] == [
        "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7",
    ]
    refined = refine_migration(relaxed, context)
    assert [order.warmup for order in stage_orders(refined)] == [8, 7, 2, 1]
    larger = _transformed(recomputing(unit_schedule(4, 16), 1), context)
    assert [order.warmup for order in stage_orders(larger)] == [8, 7, 2, 1]


def test_refinement_aligns_with_the_last_adjusted_stage_and_costs_no_time() -> None:
    context = unit_context(8)
    migrated = migrate_forwards(recomputing(unit_schedule(8, 32), 2), context)
    relaxed = relax_dependencies(migrated, context)
    refined = refine_migration(relaxed, context)
    assert [order.warmup for order in stage_orders(relaxed)] == [22, 19, 16, 5, 4, 3, 2, 1]
    assert [order.warmup for order in stage_orders(refined)] == [18, 17, 16, 5, 4, 3, 2, 1]
    assert seconds(refined, context) == seconds(relaxed, context) == 136.0
    strawman = refine_migration(migrated, context)
    assert [order.warmup for order in stage_orders(strawman)] == [18, 17, 16, 5, 4, 3, 2, 1]
    assert _text(strawman, 2).endswith(
        "B12 F18 B13 F19 B14 F20 B15 F21 B16 F22 B17 F23 B18 "
        "F24 B19 F25 B20 F26 B21 F27 B22 F28 B23 F29 B24 F30 B25 F31 B26 B27 B28 B29 B30 B31"
    )


@pytest.mark.parametrize("recompute_s", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("num_microbatches", [16, 32, 64])
@pytest.mark.parametrize("last", [0, 2, 4])
def test_execution_time_is_that_of_equation_3(
    recompute_s: float, num_microbatches: int, last: int
) -> None:
    context = unit_context(8, recompute_s)
    start = recomputing(unit_schedule(8, num_microbatches), last)
    obscura = _transformed(start, context)
    plain, adjusted = StageTimes(forward_s=1.0, backward_s=2.0), recompute_s
    stages = [replace(plain, recompute_s=adjusted if s <= last else 0.0) for s in range(8)]
    model = execution_times(stages, num_microbatches, last)
    assert seconds(obscura, context) == model[0]
    assert seconds(start, context) >= seconds(migrate_forwards(start, context), context)
    assert seconds(start, context) > model[0]


def test_equation_3_by_hand() -> None:
    """p = 8, m = 32, k = 2, r = 0.5: without recomputation it would be 117."""
    plain = StageTimes(forward_s=1.0, backward_s=2.0)
    adjusted = replace(plain, recompute_s=0.5)
    times = execution_times([adjusted] * 3 + [plain] * 5, 32, 2)
    assert times == (119.0, 115.5, 112.0, 108.0, 105.0, 102.0, 99.0, 96.0)
    assert execution_times([plain] * 8, 32, -1)[0] == 117.0


def _limited(context: PassContext, limit: float) -> PassContext:
    block = replace(context.costs.blocks[0], activation_bytes=10.0, static_bytes=20.0)
    costs = replace(context.costs, blocks=(block,) * len(context.costs.blocks))
    return replace(context, costs=costs, memory_limit_bytes=limit)


def test_identify_by_memory() -> None:
    """Stage s of 8 needs 20 + 10 (8 - s) bytes."""
    schedule, context = unit_schedule(8, 16), unit_context(8)
    assert identify(schedule, context) == schedule
    assert identify(schedule, _limited(context, 100.0)) == schedule
    identified = identify(schedule, _limited(context, 75.0))
    assert adjusted_stages(identified) == (0, 1, 2)
    assert [o.recompute.mode for o in stage_orders(identified)] == ["full"] * 3 + ["none"] * 5


def test_passes_do_nothing_without_a_limit() -> None:
    schedule = unit_schedule(4, 8)
    for name in ("identify", "identify-cmb", "obscura", "obscura-any-swap"):
        assert PASSES[name].run(schedule, unit_context(4)) == schedule


def test_a_stage_before_an_adjusted_one_is_adjusted_too() -> None:
    """Stage 1 alone is over the limit: its early forwards need early ones in stage 0."""
    schedule, context = unit_schedule(4, 8), _limited(unit_context(4), 75.0)
    heavy = replace(context.costs.blocks[1], static_bytes=60.0)
    blocks = (context.costs.blocks[0], heavy, *context.costs.blocks[2:])
    context = replace(context, costs=replace(context.costs, blocks=blocks))
    assert adjusted_stages(identify(schedule, context)) == (0, 1)


def test_other_shapes_are_refused_by_name() -> None:
    context = _limited(unit_context(4), 50.0)
    mobius = build_schedule(
        ScheduleRequest(scheme="mobius", num_devices=2, num_microbatches=4), [1.0] * 4
    )
    with pytest.raises(ConfigError, match=r"one stage per worker.*mobius.*Use scheme 1f1b"):
        identify(mobius, context)
    request = ScheduleRequest(scheme="gpipe", num_devices=4, num_microbatches=8, recompute="none")
    with pytest.raises(ConfigError, match=r"'gpipe': .* start from the order of 1f1b"):
        identify(build_schedule(request, [1.0] * 4), context)
    once = recomputing(unit_schedule(4, 8), 3)
    with pytest.raises(ConfigError, match="start from recompute: none"):
        identify_cost_effective(once, context)
    mixed = unit_schedule(4, 8)
    first = mixed.orders[0][0]
    assert isinstance(first, Forward)
    kept = (replace(first, keep=Keep.INPUT), *mixed.orders[0][1:])
    recomputed = build_schedule(
        ScheduleRequest(scheme="1f1b", num_devices=4, num_microbatches=8, recompute="full"),
        [1.0] * 4,
    )
    skipping = PASSES["skip-dead-forward"].run(recomputed, context)
    with pytest.raises(ConfigError, match="stage 3 has 0 for 8"):
        identify(skipping, context)
    with pytest.raises(ConfigError, match="all forwards of a stage to keep the same"):
        stage_orders(replace(mixed, orders=(kept, *mixed.orders[1:])))
    split = PASSES["split-backward"].run(mixed, context)
    with pytest.raises(ConfigError, match=r"unsplit backwards.*stage 0 has BI 0 0"):
        stage_orders(split)


def test_every_step_is_a_valid_plan() -> None:
    context = unit_context(4)
    schedule = recomputing(unit_schedule(4, 12), 1)
    for name in ("migrate-forwards", "relax-dependencies", "refine-migration"):
        schedule = PASSES[name].run(schedule, context)
        validate(lower(schedule))


@pytest.mark.parametrize("num_microbatches", [3, 12])
@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_a_valid_plan_for_uneven_blocks(seed: int, num_microbatches: int) -> None:
    """A stage's bubbles may hold more forwards than the stage before it runs early: measured costs
    are not even, nor are those of an embedding and a head.
    """
    source = random.Random(seed)
    context = unit_context(6)
    blocks = tuple(
        replace(block, forward_s=source.lognormvariate(0.0, 1.0), backward_input_s=source.random())
        for block in context.costs.blocks
    )
    context = replace(context, costs=replace(context.costs, blocks=blocks))
    schedule = recomputing(unit_schedule(6, num_microbatches), source.randrange(1, 6))
    for name in ("migrate-forwards", "relax-dependencies", "refine-migration"):
        schedule = PASSES[name].run(schedule, context)
        validate(lower(schedule))


def test_orders_read_back() -> None:
    schedule = unit_schedule(4, 8)
    orders = stage_orders(schedule)
    assert [order.recompute for order in orders] == [NONE] * 4
    assert [order.in_flight for order in orders] == [4, 3, 2, 1]
    assert with_orders(schedule, orders) == schedule
