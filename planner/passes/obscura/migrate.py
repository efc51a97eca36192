"""The choice of adjusted stages, and the new places of their forwards (sections 3.2, 5 and 8).

A stage over the memory limit becomes an *adjusted stage*: it recomputes everything, and the other
passes change its order. :func:`identify` is this first step of the strawman.
:func:`identify_cost_effective` (CMB-identifying) first lets such a stage drop the outputs of
operators that are large and quick to make again. Only if that is not enough does it become an
adjusted stage.

Fewer adjusted stages mean a larger distance from the last of them to the end of the pipeline. That
distance conceals recomputation. All stages up to the last adjusted one are made adjusted stages.
Forwards that run early in a stage need early forwards in the stages before. With even stages this
happens anyway.

The passes that migrate set how many forwards run before each backward (``StageOrder.ahead``); times
follow from that. Let stage s of p run w forwards in the warm-up of 1F1B (w = p - s).

=====================  ==========================================================
1F1B                   ``ahead[m] = w + m``
migrated by n          ``ahead[m] = max(w + n, w + m)``: n forwards moved in front
relaxed                ``ahead[m] = w + n + m``: the others follow, one by one
refined                the same with the n of the last adjusted stage
=====================  ==========================================================

Each is at most the number of micro-batches. Let the forward time be 1, the backward time 2. Stage s
of 1F1B then has 2 (p - s - 1) forward bubbles and half as many backward bubbles (section 3.1). n =
2 (p - s - 1) turns all forward bubbles into backward bubbles. There are then min(m - 1, 3 (p - s -
1)) of them (section 5.3), unless the stage waits for earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate
from math import floor

from penstock.host.errors import ConfigError
from penstock.planner.cost.costs import BlockCost
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura.memory import Grain, order_memory
from penstock.planner.passes.obscura.shape import (
    FULL,
    NONE,
    StageOrder,
    adjusted_stages,
    bubbles,
    one_f_one_b_ahead,
    stage_orders,
    with_orders,
)
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import order_times
from penstock.planner.schemes.base import Recomputation
from penstock.protocol.plan.instructions import Forward

COST_EFFECTIVE = frozenset({"norm", "silu", "gelu", "mul"})
"""The operators of the CMB strategy by name (sections 8 and 9.1)."""
_ROUNDING = 1e-6
"""A bubble may be short of a whole number of forwards by this share of one."""


def identify(schedule: Schedule, context: PassContext, *, grain: Grain = Grain.STAGE) -> Schedule:
    """Makes stages over the limit recompute fully (section 3.2, step 1).

    Raises:
        ConfigError: the schedule has no 1F1B shape, or it recomputes already.
    """
    return _identify(schedule, context, grain, lambda order: (FULL,))


def identify_cost_effective(
    schedule: Schedule, context: PassContext, *, grain: Grain = Grain.STAGE
) -> Schedule:
    """Makes stages over the limit drop cost-effective operators if that is enough (section 8).

    Raises:
        ConfigError: the schedule has no 1F1B shape, or it recomputes already.
    """

    def remedies(order: StageOrder) -> Iterable[Recomputation]:
        stage = context.costs.of(schedule.layout.forward[order.stage].blocks)
        return cost_effective(stage), FULL

    return _identify(schedule, context, grain, remedies)


def _identify(
    schedule: Schedule,
    context: PassContext,
    grain: Grain,
    remedies: Callable[[StageOrder], Iterable[Recomputation]],
) -> Schedule:
    orders = stage_orders(schedule)
    if any(order.recompute != NONE for order in orders):
        raise ConfigError(
            "schedule.recompute: the passes of Obscura choose what is recomputed; start from"
            " recompute: none"
        )
    limit, total = context.memory_limit_bytes, schedule.layout.num_microbatches
    if any(o.ahead != one_f_one_b_ahead(len(orders), o.stage, total) for o in orders):
        raise ConfigError(
            f"schedule.scheme = {schedule.scheme!r}: the passes of Obscura start from the order of"
            " 1f1b"
        )
    if limit is None:
        return schedule

    def fits(order: StageOrder) -> bool:
        return order_memory(schedule.layout, context.costs, order, grain) <= limit

    def remedied(order: StageOrder) -> StageOrder:
        choices = (order, *(replace(order, recompute=one) for one in remedies(order)))
        return next((choice for choice in choices if fits(choice)), choices[-1])

    chosen = [remedied(order) for order in orders]
    last = max((order.stage for order in chosen if order.recompute == FULL), default=-1)
    chosen = [replace(o, recompute=FULL) if o.stage <= last else o for o in chosen]
    return with_orders(schedule, chosen)


def cost_effective(stage: BlockCost) -> Recomputation:
    """Returns the CMB strategy for a stage: its cost-effective operators are dropped, nothing if it
    has none.
    """
    chosen = dict.fromkeys(op.name for op in stage.operators if op.name in COST_EFFECTIVE)
    return Recomputation(mode="selective", drop=tuple(chosen)) if chosen else NONE


def migrate_forwards(schedule: Schedule, context: PassContext) -> Schedule:
    """Runs as many forwards of adjusted stages early as their forward bubbles can hold.

    This is section 3.2, step 2. The forwards that stay keep their places among the backwards.
    Bubbles are those without recomputation, which moves with its backward. Where stages are uneven,
    the bubbles of one may hold more than the stage before it runs early; no more come.
    """
    orders = stage_orders(schedule)
    plain = with_orders(schedule, (replace(order, recompute=NONE) for order in orders))
    times = order_times(plain.layout, plain.orders, context.costs, hop_s=context.hop_s)
    adjusted = adjusted_stages(schedule)

    def warmup(order: StageOrder) -> int:
        if order.stage not in adjusted:
            return order.warmup
        idle_s = bubbles(plain, times, order.stage).forward_s
        forward_s = _forward_s(schedule, context, order.stage)
        return order.warmup + (floor(idle_s / forward_s + _ROUNDING) if forward_s > 0.0 else 0)

    come = accumulate(map(warmup, orders), min)
    return with_orders(
        schedule,
        (replace(o, ahead=_at_least(o.ahead, n)) for o, n in zip(orders, come, strict=True)),
    )


def relax_dependencies(schedule: Schedule, context: PassContext) -> Schedule:
    """Lets the remaining forwards of adjusted stages follow one by one, from the first backward on.

    In section 5.2 forwards move left, so that backwards can move right (late backwards do so by
    themselves). A stage then always runs ahead of its successors by its migrated forwards. It
    delays no stage until its recomputation has used them up.
    """
    del context
    adjusted = adjusted_stages(schedule)
    return with_orders(
        schedule,
        (
            replace(order, ahead=_alternating(order)) if order.stage in adjusted else order
            for order in stage_orders(schedule)
        ),
    )


def refine_migration(schedule: Schedule, context: PassContext) -> Schedule:
    """Migrates no more forwards in any adjusted stage than in the last one, k (section 5.3).

    Recomputation that stage k cannot conceal delays all stages before it. So more converted bubbles
    in earlier stages are of no use but cost memory. Converted bubbles are aligned: the p - s - 1
    backward bubbles that a stage has in 1F1B come from its dependencies and stay. So stage s < k
    keeps k - s more than stage k. It also holds k - s more micro-batches. Section 6.2: "stage s - 1
    evicts one more activation block than stage s".
    """
    del context
    adjusted = adjusted_stages(schedule)
    if not adjusted:
        return schedule
    orders = stage_orders(schedule)
    migrated = _migrated(orders[adjusted[-1]], len(orders))

    def refined(order: StageOrder) -> StageOrder:
        if order.stage not in adjusted or _migrated(order, len(orders)) <= migrated:
            return order
        usual = one_f_one_b_ahead(len(orders), order.stage, order.num_microbatches)
        fewer = replace(order, ahead=_at_least(usual, usual[0] + migrated))
        relaxed = order.ahead == _alternating(order)
        return replace(fewer, ahead=_alternating(fewer)) if relaxed else fewer

    return with_orders(schedule, map(refined, orders))


def _migrated(order: StageOrder, num_stages: int) -> int:
    usual = one_f_one_b_ahead(num_stages, order.stage, order.num_microbatches)
    return order.warmup - usual[0]


def _at_least(ahead: tuple[int, ...], warmup: int) -> tuple[int, ...]:
    return tuple(max(count, min(warmup, len(ahead))) for count in ahead)


def _alternating(order: StageOrder) -> tuple[int, ...]:
    total = order.num_microbatches
    return tuple(min(order.warmup + m, total) for m in range(total))


def _forward_s(schedule: Schedule, context: PassContext, stage: int) -> float:
    costs = context.costs
    return costs.of(schedule.layout.forward[stage].blocks).forward_s + costs.overhead_s(Forward)
