"""When compute instructions run if only they take time: orders without transfers and copies.

What passes look at while they rearrange orders, and lowering to match receives to sends. It knows
compute times and one latency per hop; links, copies, memory and the optimizer are
:mod:`penstock.planner.simulate`'s matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.planner.costs import BlockCost, Costs
from penstock.planner.layout import (
    ComputeInstruction,
    Order,
    OrderedInstruction,
    StageLayout,
    skipped_forwards,
)
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
    numbers = _Numbers(layout, skipped_forwards(layout, orders))
    seconds = seconds_of(layout, costs)
    clocks = [
        _Clock(
            seconds=[seconds(instruction) for instruction in order],
            needs=[numbers.needs(instruction) for instruction in order],
            makes=[numbers.makes(instruction) for instruction in order],
        )
        for order in orders
    ]
    made: dict[int, tuple[float, int]] = {}
    waiting: dict[int, list[int]] = defaultdict(list)
    ready = list(range(len(orders)))
    while ready:
        device = ready.pop()
        awaited = _advance(clocks[device], device, made, hop_s, waiting, ready)
        if awaited is not None:
            waiting[awaited].append(device)
    if any(len(clock.ends) < len(clock.seconds) for clock in clocks):
        raise ValueError("compute orders wait for each other in a circle, or for work nobody does")
    return OrderTimes(
        starts=tuple(tuple(clock.starts) for clock in clocks),
        ends=tuple(tuple(clock.ends) for clock in clocks),
    )


@dataclass(slots=True, kw_only=True)
class _Clock:
    """One device: per instruction its seconds and the numbers of what it needs and makes; times so
    far.
    """

    seconds: list[float]
    needs: list[tuple[int, ...]]
    makes: list[int]
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    now_s: float = 0.0


def _advance(
    clock: _Clock,
    device: int,
    made: dict[int, tuple[float, int]],
    hop_s: float,
    waiting: dict[int, list[int]],
    ready: list[int],
) -> int | None:
    """Run a device as far as it goes; returns the number of what it waits for then.

    This is the inner loop of every pass: hence the bare numbers.
    """
    now_s = clock.now_s
    for position in range(len(clock.ends), len(clock.seconds)):
        start_s = now_s
        for key in clock.needs[position]:
            if key not in made:
                clock.now_s = now_s
                return key
            there_s, maker = made[key]
            if maker != device:
                there_s += hop_s
            if there_s > start_s:
                start_s = there_s
        now_s = start_s + clock.seconds[position]
        clock.starts.append(start_s)
        clock.ends.append(now_s)
        key = clock.makes[position]
        if key >= 0:
            made[key] = (now_s, device)
            if key in waiting:
                ready += waiting.pop(key)
    clock.now_s = now_s
    return None


class _Numbers:
    """:func:`makes` and :func:`needs` with numbers instead of tuples: -1 for nothing."""

    def __init__(self, layout: StageLayout, skipped: frozenset[tuple[int, int]]) -> None:
        self._count = count = layout.num_microbatches
        self._backward = len(layout.forward) * count
        self._layout = layout
        self._skipped = skipped
        self._before = [
            -1 if stage.start == 0 else (index - 1) * count
            for index, stage in enumerate(layout.forward)
        ]
        self._after = [
            -1 if layout.is_last_backward(index) else self._backward + (index + 1) * count
            for index in range(len(layout.backward))
        ]

    def makes(self, instruction: OrderedInstruction) -> int:
        if type(instruction) is Forward:
            return instruction.stage * self._count + instruction.micro_batch
        if type(instruction) is Backward or type(instruction) is BackwardInput:
            return self._backward + instruction.stage * self._count + instruction.micro_batch
        return -1

    def needs(self, instruction: OrderedInstruction) -> tuple[int, ...]:
        if type(instruction) is Forward:
            before = self._before[instruction.stage]
            return (before + instruction.micro_batch,) if before >= 0 else ()
        if type(instruction) is Backward or type(instruction) is BackwardInput:
            after = self._after[instruction.stage]
            return (after + instruction.micro_batch,) if after >= 0 else ()
        return tuple(map(self._number, needs(self._layout, instruction, self._skipped)))

    def _number(self, key: _Key) -> int:
        code, stage, micro_batch = key
        return (0 if code == "F" else self._backward) + stage * self._count + micro_batch


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


def needs(
    layout: StageLayout,
    instruction: OrderedInstruction,
    skipped: Collection[tuple[int, int]] = (),
) -> Iterator[_Key]:
    """What an instruction waits for that another device may make.

    ``skipped``: FORWARDs that the orders leave out.
    """
    match instruction:
        case Forward(stage=s, micro_batch=m):
            if not layout.is_first_forward(s):
                yield "F", s - 1, m
        case Recompute(stage=b, micro_batch=m, after=after):
            if not layout.is_first_backward(b):
                left_out = (layout.checkpoint_source(b), m) in skipped
                yield "F", layout.checkpoint_source(b, skipped=left_out), m
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
