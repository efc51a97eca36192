"""Passes of our own that cut stages again or search for an order.

``match-stages`` and ``skip-dead-forward`` are for decoupled schedules (SPipe) with full
recomputation. The first cuts both directions again; the second leaves out the part that the
backward repeats anyway. They go together with ``overlap-recompute`` (:mod:`.mario`), which
recomputes while the gradient is on its way. So a gradient passes a backward stage in two thirds of
the time that SPipe takes. Forward stages need not be longer than that, and can be finer.

``reorder`` takes the best order that :mod:`penstock.planner.orders.search` finds. The search
follows no rule, so it is for small cases: a few devices and micro-batches. It moves no work to
another device and keeps the micro-batches of a stage in order.

Updates on devices are in :mod:`.deep_optimizer_states`, selective recomputation in
:mod:`.activation_budget`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.host.errors import ConfigError
from penstock.planner.cost.costs import Costs
from penstock.planner.orders.search import Effort, gap
from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.passes.spipe import require_decouplable
from penstock.planner.schedule.layout import ComputeInstruction, StageLayout, partition
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes.base import Recomputation, all_forward_all_backward
from penstock.planner.schemes.spipe import SCHEME
from penstock.protocol.plan.instructions import Backward, Forward, Keep
from penstock.protocol.plan.plan import StageRange

STAGES_PER_DEVICE = (1, 2, 3, 4, 6)
"""Numbers of stages per device and direction that ``match-stages`` tries."""
_EFFORT = Effort(beam_width=16, max_states=20_000, time_limit_s=60.0)
"""States end the search, so that every machine finds the same order."""


def skip_dead_forward(schedule: Schedule, context: PassContext) -> Schedule:
    """Leaves out the forward of the blocks of the last backward stage.

    That stage recomputes them from its checkpoint, and no stage needs their output: the loss is
    counted in the recomputation. If the last forward stage also has blocks before, it is cut in
    two. The pass saves the forward of one backward stage, on its device.

    Raises:
        ConfigError: several routes, or activations that forwards keep.
    """
    del context
    layout = schedule.layout
    first_dead = layout.backward[-1].start
    live = [stage for stage in layout.forward if stage.start < first_dead]
    dead_inputs = all(
        instruction.keep is Keep.INPUT
        for order in schedule.orders
        for instruction in order
        if isinstance(instruction, Forward) and instruction.stage >= len(live) - 1
    )
    if layout.num_routes > 1 or not dead_inputs:
        raise ConfigError(
            f"passes: skip-dead-forward: {schedule.scheme} has several routes or keeps activations"
            " of its last stage; accepted: one route with recompute full"
        )
    forward = _with_cut_at(layout.forward, first_dead)
    first_skipped = next(i for i, stage in enumerate(forward) if stage.start >= first_dead)
    orders = tuple(
        tuple(i for i in order if not (isinstance(i, Forward) and i.stage >= first_skipped))
        for order in schedule.orders
    )
    return replace(schedule, layout=replace(layout, forward=forward), orders=orders)


def _with_cut_at(stages: Sequence[StageRange], block: int) -> tuple[StageRange, ...]:
    """Returns the same stages, cut at ``block``; a stage on both sides becomes two."""
    result: list[StageRange] = []
    for stage in stages:
        if stage.start < block < stage.stop:
            result += [replace(stage, stop=block), replace(stage, start=block)]
        else:
            result.append(stage)
    return tuple(result)


def match_stages(schedule: Schedule, context: PassContext) -> Schedule:
    """Cuts both directions again: k_f p forward stages and k_b p + 1 backward stages, balanced.

    The extra backward stage is the last one, with the head. It begins a forward stage of its own,
    which ``skip-dead-forward`` leaves out. The pass tries the numbers of stages per device in
    ``STAGES_PER_DEVICE``; the shortest :func:`estimate_s` wins. Finer stages mean less skew and a
    shorter optimizer tail, coarser ones less overhead of instructions.

    Raises:
        ConfigError: the schedule cannot be decoupled.
    """
    require_decouplable(schedule, "match-stages")
    candidates = list(_matched_layouts(schedule.layout, context.costs))
    if not candidates:
        return schedule
    best = min(candidates, key=lambda one: estimate_s(one, context.costs))
    return replace(
        schedule,
        scheme=SCHEME.name,
        layout=best,
        orders=all_forward_all_backward(best, Recomputation(mode="full")),
    )


def estimate_s(layout: StageLayout, costs: Costs) -> float:
    """Returns the seconds of a decoupled schedule: the busiest device's work, and the skew of the
    pipeline.

    The last forward stage is taken to be skipped. The skew is p - 1 times the longest hop: a
    forward stage, or the backward of a backward stage (its recomputation runs ahead).
    """
    load_s: dict[int, float] = defaultdict(float)
    hops_s = [0.0]
    for stage in layout.forward[:-1]:
        hops_s.append(costs.of(stage.blocks).forward_s + costs.overhead_s(Forward))
        load_s[stage.device] += hops_s[-1]
    for stage in layout.backward:
        cost = costs.of(stage.blocks)
        hops_s.append(cost.backward_s + costs.overhead_s(Backward))
        load_s[stage.device] += hops_s[-1] + cost.recompute_s + costs.instruction_s
    skew_s = (layout.num_devices - 1) * max(hops_s)
    return max(load_s.values()) * layout.num_microbatches + skew_s


def _matched_layouts(layout: StageLayout, costs: Costs) -> Iterator[StageLayout]:
    count, most = layout.num_devices, layout.num_blocks - 1
    blocks = costs.blocks[: layout.num_blocks]
    backward_s = [block.recompute_s + block.backward_s for block in blocks]
    forward_s = [block.forward_s for block in blocks]
    cuts: dict[tuple[int, int], tuple[range, ...]] = {}
    for backward_each in STAGES_PER_DEVICE:
        if backward_each * count > most:
            return
        backward = partition(backward_s, backward_each * count + 1)
        live = backward[-1].start
        for forward_each in STAGES_PER_DEVICE:
            key = (live, forward_each * count)
            if forward_each <= backward_each and key[1] <= live:
                if key not in cuts:
                    cuts[key] = partition(forward_s[:live], key[1])
                yield _placed(layout, (*cuts[key], backward[-1]), backward)


def _placed(
    layout: StageLayout, forward: Sequence[range], backward: Sequence[range]
) -> StageLayout:
    """Returns SPipe's placement: the device after the last live forward stage is free first."""
    placement = SCHEME.place(len(forward) - 1, len(backward), layout.num_devices)
    last = placement.backward[-1]
    return replace(
        layout,
        forward=tuple(
            StageRange(start=blocks.start, stop=blocks.stop, device=device)
            for blocks, device in zip(forward, (*placement.forward, last), strict=True)
        ),
        backward=tuple(
            StageRange(start=blocks.start, stop=blocks.stop, device=device)
            for blocks, device in zip(backward, placement.backward, strict=True)
        ),
    )


def reorder(schedule: Schedule, context: PassContext) -> Schedule:
    """Returns the schedule in the best order of the search, or as it is if none is faster.
    Schedules with swaps or updates on devices stay: the search does not place these.

    Raises:
        ConfigError: the schedule itself is over the memory limit.
    """
    if any(not isinstance(i, ComputeInstruction) for order in schedule.orders for i in order):
        return schedule
    distance = gap(
        schedule,
        context.costs,
        memory_limit_bytes=context.memory_limit_bytes,
        hop_s=context.hop_s,
        effort=_EFFORT,
    )
    if distance.best.makespan_s >= distance.makespan_s:
        return schedule
    return replace(schedule, orders=distance.best.orders)


PASSES = (
    Pass(
        name="match-stages",
        summary="cut both directions of SPipe alike, fine and balanced (ours)",
        run=match_stages,
    ),
    Pass(
        name="skip-dead-forward",
        summary="leave out the forward that the last backward stage repeats anyway (ours)",
        run=skip_dead_forward,
    ),
    Pass(
        name="reorder",
        summary="ours: the best order that a search finds (small cases)",
        run=reorder,
    ),
)
"""The passes of this module, in the order in which they are meant to run."""
