"""Move forwards of adjusted stages among their backwards (sections 3.2 and 5).

Every pass sets how many forwards run before each backward (``StageOrder.ahead``); times follow
from that. Let stage s of p run w forwards in the warm-up of 1F1B (w = p - s).

=====================  ==========================================================
1F1B                   ``ahead[m] = w + m``
migrated by n          ``ahead[m] = max(w + n, w + m)``: n forwards moved in front
relaxed                ``ahead[m] = w + n + m``: the others follow, one by one
refined                the same with the n of the last adjusted stage
=====================  ==========================================================

(each at most the number of micro-batches). With forward time 1 and backward time 2 stage s of 1F1B
has 2 (p - s - 1) forward and p - s - 1 backward bubbles (section 3.1); n = 2 (p - s - 1) turns all
forward bubbles into backward bubbles, of which there are then min(m - 1, 3 (p - s - 1)) (section
5.3), unless the stage waits for earlier ones.
"""

from __future__ import annotations

from dataclasses import replace
from math import floor

from penstock.planner.orders.timing import order_times
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura.shape import (
    NONE,
    StageOrder,
    adjusted_stages,
    bubbles,
    one_f_one_b_ahead,
    stage_orders,
    with_orders,
)
from penstock.planner.schedule import Schedule

_ROUNDING = 1e-6
"""Share of a forward by which a bubble may be short of a whole number of forwards."""


def migrate_forwards(schedule: Schedule, context: PassContext) -> Schedule:
    """Run as many forwards of adjusted stages early as their forward bubbles can hold.

    Section 3.2, step 2. The forwards that stay keep their places among the backwards. Bubbles are
    those without recomputation, which moves with its backward.
    """
    orders = stage_orders(schedule)
    plain = with_orders(schedule, (replace(order, recompute=NONE) for order in orders))
    times = order_times(plain.layout, plain.orders, context.costs, hop_s=context.hop_s)
    adjusted = adjusted_stages(schedule)

    def migrated(order: StageOrder) -> StageOrder:
        if order.stage not in adjusted:
            return order
        idle_s = bubbles(plain, times, order.stage).forward_s
        forward_s = _forward_s(schedule, context, order.stage)
        count = floor(idle_s / forward_s + _ROUNDING) if forward_s > 0.0 else 0
        return replace(order, ahead=_at_least(order.ahead, order.warmup + count))

    return with_orders(schedule, map(migrated, orders))


def relax_dependencies(schedule: Schedule, context: PassContext) -> Schedule:
    """Let the remaining forwards of adjusted stages follow one by one, from the first backward on.

    Section 5.2: forwards move left, so that backwards can move right (they do so by themselves
    where they are late). A stage then runs ahead of its successors by its migrated forwards all the
    time, and delays nobody until its recomputation has eaten them up.
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
    """Migrate no more forwards in any adjusted stage than in the last one, k (section 5.3).

    Recomputation that stage k cannot conceal delays all stages before it, so more converted
    bubbles there are of no use but cost memory. What is aligned are the converted bubbles: the
    p - s - 1 backward bubbles that a stage has in 1F1B come from its dependencies and stay, so that
    stage s < k keeps k - s more than stage k; and it holds k - s more micro-batches, as section 6.2
    has it ("stage s - 1 evicts one more activation block than stage s").
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
    return costs.of(schedule.layout.forward[stage].blocks).forward_s + costs.instruction_s
