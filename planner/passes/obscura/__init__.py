"""Obscura: recomputation concealed in pipeline bubbles, as passes on 1F1B schedules.

Source: Huang et al., "Obscura: Concealing Recomputation Overhead in Training of Large Language
Models with Bubble-filling Pipeline Transformation", USENIX ATC 2025.

=======================  ===============================================  =================
pass                     what it does                                     section, module
=======================  ===============================================  =================
identify                 stages over the memory limit recompute fully     3.2, ``migrate``
identify-cmb             they drop cost-effective operators if enough     8, ``migrate``
migrate-forwards         forwards of adjusted stages into their bubbles   3.2, ``migrate``
relax-dependencies       their other forwards follow one by one           5.2, ``migrate``
refine-migration         only as many as the last adjusted stage needs    5.3, ``migrate``
swap-aware-recompute     the integer program: operators, lambda, beta     6, ``aware``
adjust-partition         half layers to stages that do not recompute      7, ``partition``
obscura                  all of these in this order (identify-cmb)        4
obscura-any-swap         the same with any number of evicted blocks       ours
=======================  ===============================================  =================

The paper's strawman is ``identify,migrate-forwards``. All passes need one stage per worker in the
order of 1F1B, and a memory limit. Without a limit schedules stay as they are. What a pass must know
of the ones before it, it reads from the orders
(:func:`~penstock.planner.passes.obscura.shape.adjusted_stages`).
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.passes.obscura.aware import swap_aware_recompute
from penstock.planner.passes.obscura.memory import Grain
from penstock.planner.passes.obscura.migrate import (
    identify,
    identify_cost_effective,
    migrate_forwards,
    refine_migration,
    relax_dependencies,
)
from penstock.planner.passes.obscura.partition import adjust_partition
from penstock.planner.schedule.schedule import Schedule


def obscura(
    schedule: Schedule,
    context: PassContext,
    *,
    grain: Grain = Grain.STAGE,
    evictions: Sequence[int] | None = None,
    printed: bool = False,
) -> Schedule:
    """Applies the whole transformation, from 1F1B without recomputation.

    The arguments are those of :func:`~penstock.planner.passes.obscura.aware.swap_aware_recompute`
    and :func:`~penstock.planner.passes.obscura.partition.adjust_partition`.

    Raises:
        ConfigError: the schedule has another shape, or nothing fits the memory limit.
    """
    schedule = identify_cost_effective(schedule, context, grain=grain)
    for step in (migrate_forwards, relax_dependencies, refine_migration):
        schedule = step(schedule, context)
    schedule = swap_aware_recompute(schedule, context, grain=grain, evictions=evictions)
    return adjust_partition(schedule, context, grain=grain, printed=printed)


def obscura_any_swap(schedule: Schedule, context: PassContext) -> Schedule:
    """Applies the same with any number of evicted blocks. Ours: the paper evicts 2 … p - k - 2.

    Raises:
        ConfigError: the schedule has another shape, or nothing fits the memory limit.
    """
    most = schedule.layout.num_microbatches
    return obscura(schedule, context, evictions=range(1, most))


PASSES: tuple[Pass, ...] = (
    Pass(
        name="identify",
        summary="recompute fully in stages over the memory limit (Obscura, section 3.2)",
        run=identify,
    ),
    Pass(
        name="identify-cmb",
        summary="the same, where dropping cost-effective operators is not enough (Obscura, 8)",
        run=identify_cost_effective,
    ),
    Pass(
        name="migrate-forwards",
        summary="run forwards of recomputing stages in their forward bubbles (Obscura, 3.2)",
        run=migrate_forwards,
    ),
    Pass(
        name="relax-dependencies",
        summary="shift remaining forwards left and backwards right (Obscura, 5.2)",
        run=relax_dependencies,
    ),
    Pass(
        name="refine-migration",
        summary="migrate only as many as the last recomputing stage (Obscura, 5.3)",
        run=refine_migration,
    ),
    Pass(
        name="swap-aware-recompute",
        summary="choose operators to recompute and activations to swap (Obscura, 6)",
        run=swap_aware_recompute,
    ),
    Pass(
        name="adjust-partition",
        summary="move blocks from recomputing stages to others (Obscura, 7, Algorithm 1)",
        run=adjust_partition,
    ),
    Pass(
        name="obscura",
        summary="all passes of Obscura, from 1F1B without recomputation (Obscura, 4)",
        run=obscura,
    ),
    Pass(
        name="obscura-any-swap",
        summary="the same with any number of swapped activations (ours)",
        run=obscura_any_swap,
    ),
)

__all__ = ["PASSES", "Grain", "obscura", "obscura_any_swap"]
