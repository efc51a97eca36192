"""Which stages need recomputation: those over the memory limit (sections 3.2 and 8).

:func:`identify` is the first step of the strawman: a stage over the limit becomes an *adjusted
stage* and recomputes everything; its order is changed by the passes that follow.
:func:`identify_cost_effective` (CMB-identifying) first lets such a stage drop the outputs of
operators that are large and quick to make again; only if that is not enough does it become an
adjusted stage. Fewer adjusted stages means a larger distance from the last of them to the end of
the pipeline, and that distance is what conceals recomputation.

All stages up to the last adjusted one are made adjusted stages: forwards that run early there need
forwards that run early in the stages before. With even stages that is what happens anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.planner.cost.costs import BlockCost
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura.memory import Grain, order_memory
from penstock.planner.passes.obscura.shape import (
    FULL,
    NONE,
    StageOrder,
    one_f_one_b_ahead,
    stage_orders,
    with_orders,
)
from penstock.planner.schedule import Schedule
from penstock.planner.schemes.base import Recomputation
from penstock.protocol.errors import ConfigError

COST_EFFECTIVE = frozenset({"norm", "silu", "gelu", "mul"})
"""The operators of the CMB strategy by name (sections 8 and 9.1)."""


def cost_effective(stage: BlockCost) -> Recomputation:
    """The CMB strategy for a stage: its cost-effective operators, nothing if it has none."""
    found = dict.fromkeys(op.name for op in stage.operators if op.name in COST_EFFECTIVE)
    return Recomputation(mode="selective", drop=tuple(found)) if found else NONE


def identify(schedule: Schedule, context: PassContext, *, grain: Grain = Grain.STAGE) -> Schedule:
    """Stages over the limit recompute fully (section 3.2, step 1).

    Raises:
        ConfigError: no 1F1B shape, or it recomputes already.
    """
    return _identify(schedule, context, grain, lambda order: (FULL,))


def identify_cost_effective(
    schedule: Schedule, context: PassContext, *, grain: Grain = Grain.STAGE
) -> Schedule:
    """Stages over the limit drop cost-effective operators if that is enough (section 8).

    Raises:
        ConfigError: no 1F1B shape, or it recomputes already.
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
