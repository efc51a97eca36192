"""Keep what fits: spend the memory that a device has left on activations, the dearest first.

Ours, for schedules whose forward and backward stages are coupled (Mobius, Megatron-offload, GPipe,
1F1B, …). Full recomputation leaves device memory unused, no recomputation does not fit; in between,
:class:`~penstock.protocol.plan.instructions.Keep` ``selective`` drops some operators' outputs. What
to drop is decided stage by stage: operators are ordered by seconds of recomputation per byte, and
the cheapest bytes go first. Obscura's integer program (:mod:`.obscura`) chooses the same for all
micro-batches of a stage, with swaps; here nothing is swapped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from penstock.planner.cost.costs import BlockCost
from penstock.planner.layout import Order, OrderedInstruction, Residency
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.schedule import Schedule, lower
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Recompute,
    SwapIn,
    SwapOut,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Keeping one operator more of a stage: ``seconds`` less and ``num_bytes`` more per
    micro-batch.
    """

    operator: str
    seconds: float
    num_bytes: float


def keep_what_fits(schedule: Schedule, context: PassContext) -> Schedule:
    """Drops no more than the memory limit asks for; without a limit, the device's memory.

    First everything is dropped that can be made again from the inputs of the blocks. That takes the
    memory of full recomputation (checkpoints of every block instead of every stage), and less time:
    the last product of a block need not be repeated. Then each device keeps one operator of one
    stage after the other, as far as there is room for all micro-batches that are in flight.

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


def require_operators(schedule: Schedule, context: PassContext, name: str) -> None:
    """Checks that a pass of this ``name`` can choose operators to drop in a schedule.

    Raises:
        ConfigError: stages are not coupled, costs name no operators, or activations are swapped.
    """
    layout = schedule.layout
    swaps = any(isinstance(i, SwapOut | SwapIn) for order in schedule.orders for i in order)
    coupled = all(map(layout.is_coupled, range(len(layout.forward))))
    known = all(block.operators for block in context.costs.blocks[: layout.num_blocks])
    problems = (
        (not coupled, "its backward stages are elsewhere; accepted: mobius, gpipe, 1f1b, …"),
        (not known, "costs name no operators; accepted: analytic or measured costs"),
        (swaps, "it swaps activations; run this pass before"),
    )
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
        name="keep-what-fits",
        summary="recompute only the operators whose outputs memory has no room for (ours)",
        run=keep_what_fits,
    ),
)
