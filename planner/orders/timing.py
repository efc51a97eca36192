"""When compute instructions run if only they take time: orders without transfers and copies.

What passes look at while they rearrange orders, and lowering to match receives to sends. It knows
compute times and one latency per hop; links, copies, memory and the optimizer are
:mod:`penstock.planner.simulate`'s matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.layout import (
    ComputeInstruction,
    Order,
    OrderedInstruction,
    StageLayout,
    skipped_forwards,
)
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
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
    steps = _Steps(layout, costs, skipped_forwards(layout, orders))
    clocks = [_Clock(steps=[steps.of(instruction) for instruction in order]) for order in orders]
    made: dict[int, tuple[float, int]] = {}
    waiting: dict[int, list[int]] = defaultdict(list)
    ready = list(range(len(orders)))
    while ready:
        device = ready.pop()
        awaited = _advance(clocks[device], device, made, hop_s, waiting, ready)
        if awaited is not None:
            waiting[awaited].append(device)
    if any(len(clock.ends) < len(clock.steps) for clock in clocks):
        raise ValueError("compute orders wait for each other in a circle, or for work nobody does")
    return OrderTimes(
        starts=tuple(tuple(clock.starts) for clock in clocks),
        ends=tuple(tuple(clock.ends) for clock in clocks),
    )


_Step = tuple[float, int, tuple[int, ...]]
"""An instruction's seconds, and the numbers of what it makes (-1: nothing) and of what it needs."""


@dataclass(slots=True, kw_only=True)
class _Clock:
    """One device: its steps, and their times so far."""

    steps: list[_Step]
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
    now_s, starts, ends = clock.now_s, clock.starts, clock.ends
    for position in range(len(ends), len(clock.steps)):
        seconds, makes, needs = clock.steps[position]
        start_s = now_s
        for key in needs:
            if key not in made:
                clock.now_s = now_s
                return key
            there_s, maker = made[key]
            if maker != device:
                there_s += hop_s
            if there_s > start_s:
                start_s = there_s
        now_s = start_s + seconds
        starts.append(start_s)
        ends.append(now_s)
        if makes >= 0:
            made[makes] = (now_s, device)
            if makes in waiting:
                ready += waiting.pop(makes)
    clock.now_s = now_s
    return None


class _Steps:
    """:func:`seconds_of`, :func:`makes` and :func:`needs` at once, with numbers for keys."""

    def __init__(
        self, layout: StageLayout, costs: Costs, skipped: frozenset[tuple[int, int]]
    ) -> None:
        self._count = count = layout.num_microbatches
        self._backward = len(layout.forward) * count
        self._layout = layout
        self._skipped = skipped
        self._seconds = seconds_of(layout, costs)
        self._before = [
            -1 if stage.start == 0 else (index - 1) * count
            for index, stage in enumerate(layout.forward)
        ]
        self._after = [
            -1 if layout.is_last_backward(index) else self._backward + (index + 1) * count
            for index in range(len(layout.backward))
        ]

    def of(self, instruction: OrderedInstruction) -> _Step:
        """The step of an instruction; those of a device in its order."""
        seconds = self._seconds(instruction)
        if type(instruction) is Forward:
            stage, m = instruction.stage, instruction.micro_batch
            needed = self._before[stage]
            return seconds, stage * self._count + m, (needed + m,) if needed >= 0 else ()
        if type(instruction) is Backward or type(instruction) is BackwardInput:
            stage, m = instruction.stage, instruction.micro_batch
            needed = self._after[stage]
            made = self._backward + stage * self._count + m
            return seconds, made, (needed + m,) if needed >= 0 else ()
        keys = needs(self._layout, instruction, self._skipped)
        return seconds, -1, tuple(map(self._number, keys))

    def _number(self, key: _Key) -> int:
        code, stage, micro_batch = key
        return (0 if code == "F" else self._backward) + stage * self._count + micro_batch


def seconds_of(layout: StageLayout, costs: Costs) -> Callable[[OrderedInstruction], float]:
    """How long an instruction occupies the compute stream (swaps and updates do not).

    Ask for a selective FORWARD before its RECOMPUTE.
    """
    forward = [costs.of(stage.blocks) for stage in layout.forward]
    backward = [costs.of(stage.blocks) for stage in layout.backward]
    fixed_s = costs.instruction_s
    forward_s = [cost.forward_s + fixed_s for cost in forward]
    recompute_s = [cost.recompute_s + fixed_s for cost in backward]
    backward_s = [cost.backward_s + fixed_s for cost in backward]
    input_s = [cost.backward_input_s + fixed_s for cost in backward]
    dropped: dict[tuple[int, int], tuple[str, ...]] = {}
    again_s: dict[tuple[int, tuple[str, ...]], float] = {}

    def remake_s(stage: int, drop: tuple[str, ...]) -> float:
        if (stage, drop) not in again_s:
            again_s[stage, drop] = backward[stage].drop_seconds(drop) + fixed_s
        return again_s[stage, drop]

    def seconds(instruction: OrderedInstruction) -> float:
        if type(instruction) is Forward:
            if instruction.drop:
                dropped[instruction.stage, instruction.micro_batch] = instruction.drop
            return forward_s[instruction.stage]
        if type(instruction) is Backward:
            return backward_s[instruction.stage]
        if type(instruction) is BackwardInput:
            return input_s[instruction.stage]
        if type(instruction) is BackwardWeight:
            weight_s = backward[instruction.stage].backward_weight_s
            return weight_s * len(instruction.micro_batches) + fixed_s
        if type(instruction) is Recompute:
            drop = dropped.get((instruction.stage, instruction.micro_batch), ())
            return remake_s(instruction.stage, drop) if drop else recompute_s[instruction.stage]
        return 0.0

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
