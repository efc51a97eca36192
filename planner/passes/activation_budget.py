"""Keep what fits: spends the memory that a device has left on activations, the dearest first.

The passes are ours, for coupled forward and backward stages (Mobius, Megatron-offload, GPipe, 1F1B,
…). ``keep-graphs`` keeps all that some micro-batches of some stages save, and recomputes the
others. It needs no operators, so layers may be compiled.

``keep-what-fits`` chooses operators: full recomputation leaves device memory unused, no
recomputation does not fit. In between, :class:`~penstock.protocol.plan.instructions.Keep`
``selective`` drops some operators' outputs. Each stage decides for itself: operators are ordered by
seconds of recomputation per byte, and the cheapest bytes go first. Obscura's integer program
(:mod:`.obscura`) chooses the same operators for all micro-batches of a stage, with swaps; here
nothing is swapped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from penstock.host.errors import ConfigError
from penstock.planner.cost.costs import BlockCost
from penstock.planner.memory.footprint import Footprint, device_peaks, footprints
from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.schedule.layout import Order, OrderedInstruction, Residency
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Program,
    Recompute,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Keeping one operator more of a stage: ``seconds`` less and ``num_bytes`` more per
    micro-batch.
    """

    operator: str
    seconds: float
    num_bytes: float


Work = tuple[int, int]
"""A stage and a micro-batch."""

_GUESS_MARGIN = 1.35
"""Factor on bytes of graphs without a measurement. Eager layers in bf16 save 1.08 to 1.31 times the
block table's bytes, compiled layers 0.77 to 0.84 times (LLaMA, Qwen3).
"""


def keep_what_fits(schedule: Schedule, context: PassContext) -> Schedule:
    """Drops no more than the memory limit requires; without a limit, the device's memory.

    First all operators are dropped that can be made again from the inputs of the blocks. That takes
    the memory of full recomputation, with checkpoints of every block instead of every stage. It
    takes less time: the last product of a block need not be repeated. Then each device keeps
    operators of one stage after the other, as long as all micro-batches in flight have room.

    Raises:
        ConfigError: stages are not coupled, costs name no operators, activations are swapped, or
            there is too little memory even with everything dropped.
    """
    require_operators(schedule, context, "keep-what-fits")
    limit = context.device_limit_bytes
    costs = [context.costs.of(stage.blocks) for stage in schedule.layout.forward]
    steps = [_steps(cost) for cost in costs]
    dropped = [frozenset(step.operator for step in stage) for stage in steps]
    least = with_drops(schedule, dropped)
    peaks = device_peaks(lower(least), context.costs)
    in_flight = [_in_flight(order) for order in schedule.orders]
    for device, order in enumerate(schedule.orders):
        room = limit - peaks[device].total_bytes
        if room < 0.0:
            raise ConfigError(
                f"passes: keep-what-fits: device {device} needs {peaks[device].total_bytes:.4g}"
                f" bytes with everything dropped, the limit is {limit:.4g}; use more stages,"
                " smaller micro-batches, or spipe with recompute full"
            )
        for stage, operator in _wishes(order, steps):
            more = costs[stage].drop_bytes(dropped[stage])
            more -= costs[stage].drop_bytes(dropped[stage] - {operator})
            needed = more * in_flight[device][stage]
            if needed <= room:
                room -= needed
                dropped[stage] -= {operator}
    return with_drops(schedule, dropped)


def keep_graphs(schedule: Schedule, context: PassContext) -> Schedule:
    """Keeps whole graphs instead of recomputing them, as many as the memory limit (without one, the
    device's memory) has room for. Graphs that would wait shortest for their backward come first:
    each takes as much memory a second as any, and saves as much.

    Raises:
        ConfigError: stages are not coupled, or there is too little memory even without any graph.
    """
    _refuse(schedule, "keep-graphs", [_uncoupled(schedule)])
    plan, limit = lower(schedule), context.device_limit_bytes
    memory = footprints(plan, context.costs)
    for device, footprint in enumerate(memory):
        if footprint.peak.total_bytes > limit:
            raise ConfigError(
                f"passes: keep-graphs: device {device} needs {footprint.peak.total_bytes:.4g} bytes"
                f" with everything recomputed, the limit is {limit:.4g}; use more stages or smaller"
                " micro-batches"
            )
    return _filled(schedule, plan, memory, context)


def with_kept_graphs(schedule: Schedule, context: PassContext) -> Schedule:
    """Returns :func:`keep_graphs` of a schedule; the schedule itself where stages are not coupled,
    or memory has no room for a graph.
    """
    uncoupled, _ = _uncoupled(schedule)
    if uncoupled:
        return schedule
    plan = lower(schedule)
    return _filled(schedule, plan, footprints(plan, context.costs), context)


def _filled(
    schedule: Schedule, plan: Plan, memory: Sequence[Footprint], context: PassContext
) -> Schedule:
    """Returns the schedule with the graphs that fit; ``memory``: that of its ``plan``."""
    layout, limit = schedule.layout, context.device_limit_bytes
    measured = all(block.operators for block in context.costs.blocks[: layout.num_blocks])
    margin = 1.0 if measured else _GUESS_MARGIN
    kept: set[Work] = set()
    for device, footprint in enumerate(memory):
        totals = np.array(footprint.total_bytes)
        for span, work in _recomputed(plan.programs[device]):
            blocks = layout.forward[work[0]].blocks
            more = context.costs.of(blocks).activation_bytes * margin
            if blocks.start:
                more -= context.costs.input_bytes(blocks.start)  # kept until now, as a checkpoint
            if totals[span].max() + more <= limit:
                totals[span] += more
                kept.add(work)
    return _within(schedule, kept, context)


def _recomputed(program: Program) -> list[tuple[slice, Work]]:
    """Yields the first and the last position of each graph that a program recomputes, and the
    graph; the shortest first.
    """
    starts: dict[Work, int] = {}
    spans = []
    for at, instruction in enumerate(program):
        match instruction:
            case Forward(stage=s, micro_batch=m, keep=Keep.INPUT):
                starts[s, m] = at
            case Recompute(stage=s, micro_batch=m) if (s, m) in starts:
                spans.append((slice(starts[s, m], at), (s, m)))
    return sorted(spans, key=lambda pair: (pair[0].stop - pair[0].start, pair[1]))


def _within(schedule: Schedule, kept: set[Work], context: PassContext) -> Schedule:
    """Returns the schedule with the graphs of ``kept``. Graphs of early stages are left out if
    workspaces of forwards with graphs need the memory.
    """
    by_stage = sorted(kept, reverse=True)
    while by_stage:
        filled = _with_graphs(schedule, frozenset(by_stage))
        peaks = device_peaks(lower(filled), context.costs)
        if all(peak.total_bytes <= context.device_limit_bytes for peak in peaks):
            return filled
        del by_stage[len(by_stage) - max(1, len(by_stage) // 16) :]
    return schedule


def _with_graphs(schedule: Schedule, kept: frozenset[Work]) -> Schedule:
    def changed(order: Order) -> Iterator[OrderedInstruction]:
        for instruction in order:
            match instruction:
                case Forward(stage=s, micro_batch=m) if (s, m) in kept:
                    yield replace(instruction, keep=Keep.ALL)
                case Recompute(stage=s, micro_batch=m) if (s, m) in kept:
                    pass
                case _:
                    yield instruction

    orders = tuple(tuple(changed(order)) for order in schedule.orders)
    rebinds = schedule.rebinds_weights or schedule.residency is Residency.STREAMED
    return replace(schedule, orders=orders, rebinds_weights=rebinds)


def require_operators(schedule: Schedule, context: PassContext, name: str) -> None:
    """Checks that a pass of this ``name`` can choose operators to drop in a schedule.

    Raises:
        ConfigError: stages are not coupled, costs name no operators, or activations are swapped.
    """
    layout = schedule.layout
    swaps = any(isinstance(i, SwapOut | SwapIn) for order in schedule.orders for i in order)
    known = all(block.operators for block in context.costs.blocks[: layout.num_blocks])
    problems = (
        _uncoupled(schedule),
        (not known, "costs name no operators; accepted: analytic or measured costs"),
        (swaps, "it swaps activations; run this pass before"),
    )
    _refuse(schedule, name, problems)


def _uncoupled(schedule: Schedule) -> tuple[bool, str]:
    """Returns whether a backward stage differs from the forward stage of its number, and a reason
    to refuse that.
    """
    layout = schedule.layout
    coupled = all(map(layout.is_coupled, range(len(layout.forward))))
    return not coupled, "its backward stages are elsewhere; accepted: mobius, gpipe, 1f1b, …"


def _refuse(schedule: Schedule, name: str, problems: Iterable[tuple[bool, str]]) -> None:
    """Raises for the first problem that a schedule has; ``name``: of the pass."""
    for wrong, reason in problems:
        if wrong:
            raise ConfigError(f"passes: {name}: {schedule.scheme}: {reason}")


def _steps(cost: BlockCost) -> tuple[_Step, ...]:
    """Returns what can be dropped, the dearest first: it is kept first."""
    seconds: dict[str, float] = defaultdict(float)
    num_bytes: dict[str, float] = defaultdict(float)
    for operator in cost.operators:
        seconds[operator.name] += operator.forward_s
        num_bytes[operator.name] += operator.activation_bytes
    made = {source.operator for source in cost.sources}
    steps = (
        _Step(operator=name, seconds=seconds[name], num_bytes=num_bytes[name])
        for name in seconds
        if num_bytes[name] > 0.0 or name in made
    )
    return tuple(sorted(steps, key=lambda step: -step.seconds / (step.num_bytes or inf)))


def _wishes(order: Order, steps: list[tuple[_Step, ...]]) -> Iterator[tuple[int, str]]:
    """Yields (stage, operator) to keep on a device, in the order in which they are tried.

    The dearest operator of all stages comes first, and among equals the first stage. So devices
    choose alike, and stages that run at the same time stay equally long.
    """
    stages = _in_flight(order)
    for rank, stage in sorted((rank, s) for s in stages for rank in range(len(steps[s]))):
        yield stage, steps[stage][rank].operator


def _in_flight(order: Order) -> Mapping[int, int]:
    """Returns, by stage, how many micro-batches are between forward and backward at most, at one
    time.
    """
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for instruction in order:
        match instruction:
            case Forward(stage=s):
                now[s] += 1
                most[s] = max(most[s], now[s])
            case Backward(stage=s):
                now[s] -= 1
            case BackwardWeight(stage=s, micro_batches=batches):
                now[s] -= len(batches)
    return most


def operators_by_worth(cost: BlockCost) -> tuple[str, ...]:
    """Returns the names of what can be dropped, the dearest to make again per byte first."""
    return tuple(step.operator for step in _steps(cost))


def with_drops(schedule: Schedule, dropped: list[frozenset[str]]) -> Schedule:
    """Returns the schedule with forwards that drop these operators, by forward stage, and with
    recomputations where there are any.
    """
    drops = [tuple(sorted(names)) for names in dropped]
    orders = tuple(tuple(_selective(order, drops)) for order in schedule.orders)
    streamed = schedule.residency is Residency.STREAMED
    return replace(schedule, orders=orders, rebinds_weights=streamed)


def _selective(order: Order, drops: list[tuple[str, ...]]) -> Iterator[OrderedInstruction]:
    """Yields the order with each forward's drops, and with recomputations where there are any."""
    for instruction in order:
        match instruction:
            case Forward(stage=s):
                keep = Keep.SELECTIVE if drops[s] else Keep.ALL
                yield replace(instruction, keep=keep, drop=drops[s])
            case Recompute():
                pass
            case Backward(stage=s, micro_batch=m) | BackwardInput(stage=s, micro_batch=m):
                if drops[s]:
                    yield Recompute(stage=s, micro_batch=m)
                yield instruction
            case _:
                yield instruction


PASSES = (
    Pass(
        name="keep-graphs",
        summary="keep the graphs that memory has room for, recompute the others (ours)",
        run=keep_graphs,
    ),
    Pass(
        name="keep-what-fits",
        summary="recompute only operators with outputs that memory has no room for (ours)",
        run=keep_what_fits,
    ),
)
