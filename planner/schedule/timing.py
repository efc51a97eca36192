"""Times of compute instructions if only they take time: orders without transfers and copies.

Passes use them to rearrange orders, and lowering to match receives to sends. The model has compute
times and one latency per hop. :mod:`penstock.planner.simulate` adds links, copies, memory and the
optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.schedule.layout import (
    Order,
    OrderedInstruction,
    StageLayout,
)
from penstock.protocol.plan.instructions import (
    BackwardWeight,
    Opcode,
    Phase,
    Recompute,
)
from penstock.protocol.plan.resources import PlanFacts, Resource, StateKind, TensorKind
from penstock.protocol.plan.semantics import (
    COMPUTES,
    SEMANTICS,
    Lane,
    classes,
    reads,
    row_of,
    side_of,
)

_UNIT_BLOCK = BlockCost(forward_s=1.0, recompute_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)

Maker = tuple[Phase, int, int]
"""Side, stage and micro-batch of the FORWARD or (first half of a) BACKWARD that others wait for."""

_AWAITED = frozenset({*TensorKind, StateKind.DEFERRED})

_PLAIN = classes(
    lambda row: (
        any(made.kind in _AWAITED for made in row.makes)
        and row.lane is Lane.COMPUTE
        and all(read.when is None for read in row.reads)
    )
)
"""Instructions that wait for the same thing in every micro-batch: most of an order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTimes:
    """Holds ``starts[d][i]`` and ``ends[d][i]`` of instruction ``i`` of device ``d``, in seconds.

    Swaps and updates take no time here.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        """When the last instruction ends."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)


def unit_costs(layout: StageLayout) -> Costs:
    """Returns costs by which a block takes 1 in FORWARD and RECOMPUTE and 2 in BACKWARD."""
    return Costs(blocks=(_UNIT_BLOCK,) * layout.num_blocks)


def order_times(
    layout: StageLayout, orders: Sequence[Order], costs: Costs, *, hop_s: float = 0.0
) -> OrderTimes:
    """Returns the earliest times of orders; ``hop_s`` passes between two devices.

    Raises:
        ValueError: the orders cannot finish: an instruction waits for one that never runs before
            it.
    """
    steps = _Steps(PlanFacts.of(layout, orders), costs)
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
        raise ValueError("compute orders wait for each other in a circle, or for work of no device")
    return OrderTimes(
        starts=tuple(tuple(clock.starts) for clock in clocks),
        ends=tuple(tuple(clock.ends) for clock in clocks),
    )


_Step = tuple[float, int, tuple[int, ...]]
"""An instruction's seconds, and the numbers of what it makes (-1: nothing) and of what it needs."""


@dataclass(slots=True, kw_only=True)
class _Clock:
    """Holds the steps of one device, and their times so far."""

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
    """Runs a device as far as it goes; returns the number of what it waits for then.

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
    """:func:`seconds_of`, :func:`maker_of` and :func:`needs` at once, with numbers for makers."""

    def __init__(self, facts: PlanFacts, costs: Costs) -> None:
        self._facts = facts
        plain = PlanFacts(layout=facts.layout)
        self._seconds = seconds_of(facts, costs)
        self._count = facts.layout.num_microbatches
        num_stages = {Phase.FORWARD: len(facts.layout.forward)}
        num_stages[Phase.BACKWARD] = len(facts.layout.backward)
        self._offsets = {Phase.FORWARD: 0, Phase.BACKWARD: num_stages[Phase.FORWARD] * self._count}
        self._plain = {
            cls: [self._of_stage(plain, cls.opcode, stage) for stage in range(num_stages[side])]
            for cls in _PLAIN
            if (side := SEMANTICS[cls.opcode].side) is not None
        }

    def of(self, instruction: OrderedInstruction) -> _Step:
        """Returns the step of an instruction."""
        seconds = self._seconds(instruction)
        stages = self._plain.get(type(instruction))
        if stages is not None:
            made, needed = stages[instruction.stage]  # type: ignore[union-attr]  # no UPDATE
            m: int = instruction.micro_batch  # type: ignore[union-attr]  # as above
            return seconds, made + m, (needed + m,) if needed >= 0 else ()
        return seconds, -1, tuple(map(self._number, needs(self._facts, instruction)))

    def _of_stage(self, plain: PlanFacts, opcode: Opcode, stage: int) -> tuple[int, int]:
        """Returns what an instruction makes, and needs (-1: nothing), for micro-batch 0. It is
        in the orders, so its input is there unless it is the first of its route.
        """
        row = SEMANTICS[opcode]
        assert row.side is not None
        needed = -1
        for kind, step, _, _ in row.reads:
            if kind in _AWAITED and plain.exists(kind, stage + step, 0):
                needed = self._number((*plain.maker(Resource(kind, stage + step, 0)), 0))
        return self._number((row.side, stage, 0)), needed

    def _number(self, maker: Maker) -> int:
        side, stage, micro_batch = maker
        return self._offsets[side] + stage * self._count + micro_batch


def stage_seconds(layout: StageLayout, costs: Costs) -> dict[type[Any], list[float]]:
    """Returns by class of compute instruction and stage the seconds per micro-batch, without
    overhead.
    """
    return {
        cls: [
            costs.of(stage.blocks).seconds_of(cls)
            for stage in layout.stages(SEMANTICS[cls.opcode].side or Phase.BACKWARD)
        ]
        for cls in COMPUTES
    }


def seconds_of(facts: PlanFacts, costs: Costs) -> Callable[[OrderedInstruction], float]:
    """Returns a function that says how many seconds an instruction occupies the compute stream;
    swaps and updates occupy none of it.
    """
    by_stage = stage_seconds(facts.layout, costs)
    overhead_s = {kind: costs.overhead_s(kind) for kind in by_stage}
    again_s: dict[tuple[int, tuple[str, ...]], float] = {}

    def remake_s(stage: int, drop: tuple[str, ...]) -> float:
        if (stage, drop) not in again_s:
            cost = costs.of(facts.layout.backward[stage].blocks)
            again_s[stage, drop] = cost.drop_seconds(drop) + overhead_s[Recompute]
        return again_s[stage, drop]

    def seconds(instruction: OrderedInstruction) -> float:
        per_stage = by_stage.get(type(instruction))
        if per_stage is None:
            return 0.0
        fixed_s = overhead_s[type(instruction)]
        stage: int = instruction.stage  # type: ignore[union-attr]  # it computes
        if type(instruction) is Recompute:
            drop = facts.drops.get((stage, instruction.micro_batch))
            if drop:
                return remake_s(stage, drop)
        elif type(instruction) is BackwardWeight:
            return per_stage[stage] * len(instruction.micro_batches) + fixed_s
        return per_stage[stage] + fixed_s

    return seconds


def maker_of(instruction: OrderedInstruction) -> Maker | None:
    """Returns the name of an instruction that others wait for; ``None`` of the rest."""
    if not any(made.kind in _AWAITED for made in row_of(instruction).makes):
        return None
    return side_of(instruction), instruction.stage, instruction.micro_batch  # type: ignore[union-attr]


def needs(facts: PlanFacts, instruction: OrderedInstruction) -> Iterator[Maker]:
    """Yields the instructions that an instruction waits for. Graphs have their place in an order,
    and are not awaited.
    """
    for resource in reads(instruction, facts):
        if resource.kind in _AWAITED:
            yield (*facts.maker(resource), resource.micro_batch)
