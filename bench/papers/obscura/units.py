"""Obscura in units: forward 1, backward 2, recomputation 1 (sections 3 and 5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from bench.papers.obscura.testbed import waiting_for_gradients
from bench.papers.page import PaperTable
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura.migrate import migrate_forwards
from penstock.planner.passes.obscura.shape import FULL, NONE, bubbles, stage_orders, with_orders
from penstock.planner.schedule.layout import Residency, StageLayout
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import order_times
from penstock.planner.schemes import SCHEMES
from penstock.protocol.plan.plan import StageRange

FIGURE_5: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "Recomp-0": (19, 0),
        "Recomp-1": (25, 1),
        "Recomp-All": (33, 3),
        "Strawman-0": (8, 0),
        "Strawman-1": (17, 1),
    }
)
"""Percent of time added, and the last stage that recomputes."""


def unit_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns 1F1B with a block a stage, nothing recomputed."""
    stages = tuple(StageRange(start=s, stop=s + 1, device=s) for s in range(num_stages))
    layout = StageLayout(
        num_devices=num_stages,
        num_microbatches=num_microbatches,
        forward=stages,
        backward=stages,
    )
    return Schedule(
        scheme="1f1b",
        layout=layout,
        orders=SCHEMES["1f1b"].order(layout, NONE),
        residency=Residency.RESIDENT,
    )


def unit_context(num_stages: int, recompute_s: float = 1.0) -> PassContext:
    """Returns costs of forward 1 and backward 2 in every stage; transfers take no time."""
    block = BlockCost(
        forward_s=1.0, recompute_s=recompute_s, backward_input_s=1.0, backward_weight_s=1.0
    )
    return PassContext(
        costs=Costs(blocks=(block,) * num_stages), cluster=Cluster(devices_per_node=num_stages)
    )


def recomputing(schedule: Schedule, last: int) -> Schedule:
    """Returns the schedule in which stages 0 … ``last`` recompute fully, inside the backward:
    Recomp-N.
    """
    orders = (
        replace(order, recompute=FULL if order.stage <= last else NONE)
        for order in stage_orders(schedule)
    )
    return waiting_for_gradients(with_orders(schedule, orders))


def seconds(schedule: Schedule, context: PassContext) -> float:
    """Returns the makespan by compute alone."""
    return order_times(schedule.layout, schedule.orders, context.costs).makespan_s


def bubble_table(num_stages: int = 8, num_microbatches: int = 32) -> PaperTable:
    """Returns the bubbles of sections 3.1 and 5.3."""
    context, plain = unit_context(num_stages), unit_schedule(num_stages, num_microbatches)
    times = order_times(plain.layout, plain.orders, context.costs)
    rows: list[tuple[str, ...]] = []
    for stage in range(num_stages):
        usual = bubbles(plain, times, stage)
        later = num_stages - stage - 1
        converted = converted_bubbles(plain, context, stage)
        rows.append(
            (
                str(stage),
                f"{2 * later}",
                f"{usual.forward_s:g}",
                f"{later}",
                f"{usual.backward_s:g}",
                f"{min(num_microbatches - 1, 3 * later)}",
                f"{converted:g}",
            )
        )
    return PaperTable(
        title="Obscura: bubbles of 1F1B, and after migration",
        text=(
            f"Sections 3.1 and 5.3: {num_stages} stages, {num_microbatches} micro-batches, f = 1,"
            " b = 2; bubbles in units of f. Paper: 2 (p - s - 1) forward and p - s - 1 backward"
            " bubbles; up to min(m - 1, 3 (p - s - 1)) backward bubbles in an adjusted stage."
        ),
        columns=(
            "stage",
            "forward, paper",
            "forward, ours",
            "backward, paper",
            "backward, ours",
            "after migration, paper",
            "after migration, ours",
        ),
        rows=tuple(rows),
    )


def converted_bubbles(schedule: Schedule, context: PassContext, stage: int) -> float:
    """Returns the backward bubbles of the last of the adjusted stages 0 … ``stage``, before they
    are used.
    """
    adjusted = migrate_forwards(recomputing(schedule, stage), context)
    bare = with_orders(adjusted, (replace(o, recompute=NONE) for o in stage_orders(adjusted)))
    times = order_times(bare.layout, bare.orders, context.costs)
    return bubbles(bare, times, stage).backward_s


def strawman_table() -> PaperTable:
    """Returns figure 5 (sections 3.1 and 3.2)."""
    context = unit_context(4)
    rows: list[tuple[str, ...]] = []
    for name, (percent, last) in FIGURE_5.items():
        cells = [
            f"{100 * overhead(last, count, context, early=name.startswith('S')):.1f} %"
            for count in (8, 12, 16)
        ]
        rows.append((name, f"{percent} %", *cells))
    return PaperTable(
        title="Obscura: time added by recomputation on demand, and by the strawman",
        text=(
            "Sections 3.1 and 3.2: four stages, full recomputation in stages 0 … N, over no"
            " recomputation. f = 1, b = 2, r = 1, recomputation inside the backward. The paper does"
            " not say how many micro-batches it ran; with 12 all five numbers are within 2 points."
        ),
        columns=("pipeline", "paper", "m = 8", "m = 12", "m = 16"),
        rows=tuple(rows),
    )


def overhead(last: int, num_microbatches: int, context: PassContext, *, early: bool) -> float:
    """Returns the time that Recomp-N (``early``: Strawman-N) adds, as a share."""
    plain = unit_schedule(4, num_microbatches)
    changed = recomputing(plain, last)
    if early:
        changed = migrate_forwards(changed, context)
    return seconds(changed, context) / seconds(plain, context) - 1.0
