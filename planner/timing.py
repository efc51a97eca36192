"""When compute instructions run if only they take time: orders without transfers and copies.

What passes look at while they rearrange orders, and lowering to match receives to sends. It knows
compute times and one latency per hop; links, copies, memory and the optimizer are
:mod:`penstock.planner.simulate`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.planner.costs import BlockCost, Costs
from penstock.planner.layout import ComputeInstruction, Order, OrderedInstruction, StageLayout
from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Recompute,
    RecomputeAfter,
)

_UNIT_BLOCK = BlockCost(forward_s=1.0, recompute_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)

_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTimes:
    """``starts[d][i]`` and ``ends[d][i]`` of instruction ``i`` of device ``d``, in seconds.

    Swaps and updates take no time here.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        """When the last instruction ends."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)


def unit_costs(layout: StageLayout) -> Costs:
    """A block costs 1 in FORWARD and RECOMPUTE and 2 in BACKWARD."""
    return Costs(blocks=(_UNIT_BLOCK,) * layout.num_blocks)


def order_times(
    layout: StageLayout, orders: Sequence[Order], costs: Costs, *, hop_s: float = 0.0
) -> OrderTimes:
    """Earliest times of orders; ``hop_s`` passes between two devices.

    Raises:
        ValueError: the orders cannot finish: an instruction waits for one that never runs before
            it.
    """
    seconds = seconds_of(layout, costs)
    ended: dict[_Key, tuple[float, int]] = {}
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            clock = ends[device][-1] if ends[device] else 0.0
            for instruction in order[len(ends[device]) :]:
                start: float | None = clock
                for key in needs(layout, instruction):
                    made = ended.get(key)
                    if made is None:
                        start = None
                        break
                    start = max(start or 0.0, made[0] + (hop_s if made[1] != device else 0.0))
                if start is None:
                    break
                clock = start + seconds(instruction)
                starts[device].append(start)
                ends[device].append(clock)
                for key in makes(instruction):
                    ended[key] = (clock, device)
                moved = True
    if any(len(done) < len(order) for done, order in zip(ends, orders, strict=True)):
        raise ValueError("compute orders wait for each other in a circle, or for work nobody does")
    return OrderTimes(starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))


def seconds_of(layout: StageLayout, costs: Costs) -> Callable[[OrderedInstruction], float]:
    """How long an instruction occupies the compute stream (swaps and updates do not)."""
    forward = [costs.of(stage.blocks) for stage in layout.forward]
    backward = [costs.of(stage.blocks) for stage in layout.backward]
    dropped: dict[tuple[int, int], tuple[str, ...]] = {}
    recomputed: dict[tuple[int, tuple[str, ...]], float] = {}

    def recompute_s(stage: int, micro_batch: int) -> float:
        drop = dropped.get((stage, micro_batch))
        if drop is None:
            return backward[stage].recompute_s
        if (stage, drop) not in recomputed:
            recomputed[stage, drop] = backward[stage].drop_seconds(drop)
        return recomputed[stage, drop]

    def seconds(instruction: OrderedInstruction) -> float:
        match instruction:
            case Forward(stage=s, micro_batch=m, keep=keep, drop=drop):
                if keep is Keep.SELECTIVE:
                    dropped[s, m] = drop
                work = forward[s].forward_s
            case Recompute(stage=b, micro_batch=m):
                work = recompute_s(b, m)
            case Backward(stage=b):
                work = backward[b].backward_s
            case BackwardInput(stage=b):
                work = backward[b].backward_input_s
            case BackwardWeight(stage=b, micro_batches=batches):
                work = backward[b].backward_weight_s * len(batches)
            case _:
                return 0.0
        return work + costs.instruction_s

    return seconds


def makes(instruction: OrderedInstruction) -> Iterator[_Key]:
    """What becomes available when an instruction has run: F, R or B of (stage, micro-batch)."""
    match instruction:
        case Forward(stage=s, micro_batch=m):
            yield "F", s, m
        case Recompute(stage=b, micro_batch=m):
            yield "R", b, m
        case Backward(stage=b, micro_batch=m) | BackwardInput(stage=b, micro_batch=m):
            yield "B", b, m


def needs(layout: StageLayout, instruction: OrderedInstruction) -> Iterator[_Key]:
    """What an instruction waits for that another device may make."""
    match instruction:
        case Forward(stage=s, micro_batch=m):
            if not layout.is_first_forward(s):
                yield "F", s - 1, m
        case Recompute(stage=b, micro_batch=m, after=after):
            if not layout.is_first_backward(b):
                yield "F", layout.checkpoint_source(b), m
            if after is RecomputeAfter.GRADIENT and not layout.is_last_backward(b):
                yield "B", b + 1, m
        case Backward(stage=b, micro_batch=m) | BackwardInput(stage=b, micro_batch=m):
            if not layout.is_last_backward(b):
                yield "B", b + 1, m
        case BackwardWeight(stage=b, micro_batches=batches):
            for m in batches:
                yield "B", b, m


def is_compute(instruction: OrderedInstruction) -> bool:
    """Occupies the compute stream."""
    return isinstance(instruction, ComputeInstruction)
