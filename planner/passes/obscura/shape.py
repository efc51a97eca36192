"""1F1B-shaped orders, which the passes of this folder work on, and the facts that follow from them.

A stage's order is a warm-up of forwards, then backwards with forwards between them, both in the
order of micro-batches. Obscura's passes only change *where* forwards are among the backwards
(:attr:`StageOrder.ahead`) and which tensors forwards keep. Swaps are in
:mod:`penstock.planner.passes.obscura.aware`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.host.errors import ConfigError
from penstock.host.sums import added
from penstock.planner.schedule.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import OrderTimes
from penstock.planner.schemes.base import Recomputation
from penstock.protocol.plan.instructions import (
    Backward,
    Forward,
    Keep,
    Recompute,
    RecomputeAfter,
    SwapIn,
    SwapOut,
)

NONE = Recomputation(mode="none")
FULL = Recomputation(mode="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """The order of one stage, which is its device's only one.

    ``ahead[m]``: how many forwards run before backward ``m`` (and its recomputation); it never
    decreases. 1F1B has ``min(p - s + m, micro-batches)`` in stage ``s`` of ``p``. ``after``: what
    recomputation waits for.
    """

    stage: int
    recompute: Recomputation
    ahead: tuple[int, ...]
    after: RecomputeAfter = RecomputeAfter.CHECKPOINT

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of the stage: all."""
        return len(self.ahead)

    @property
    def warmup(self) -> int:
        """The number of forwards before the first backward."""
        return self.ahead[0]

    @property
    def in_flight(self) -> int:
        """The most micro-batches between the start of the forward and the end of the backward."""
        return max(count - m for m, count in enumerate(self.ahead))

    def instructions(self) -> Order:
        """Returns the order as instructions."""
        order: list[OrderedInstruction] = []
        done = 0
        for m, count in enumerate(self.ahead):
            order += (self.recompute.forward(self.stage, f) for f in range(done, count))
            order += self.backward(m)
            done = count
        return tuple(order)

    def backward(self, micro_batch: int) -> Iterator[OrderedInstruction]:
        """Yields one backward, after its recomputation."""
        for instruction in self.recompute.backward(self.stage, micro_batch):
            if isinstance(instruction, Recompute):
                yield replace(instruction, after=self.after)
            else:
                yield instruction


def one_f_one_b_ahead(num_stages: int, stage: int, num_microbatches: int) -> tuple[int, ...]:
    """Returns :attr:`StageOrder.ahead` of 1F1B (DAPPLE)."""
    return tuple(min(num_stages - stage + m, num_microbatches) for m in range(num_microbatches))


def stage_orders(schedule: Schedule, *, swaps: bool = False) -> tuple[StageOrder, ...]:
    """Reads the orders of a 1F1B-shaped schedule, stage by stage; with ``swaps`` it ignores those.

    Raises:
        ConfigError: the schedule has another shape; the message says what was expected.
    """
    require_shape(schedule)
    return tuple(
        _read(stage, [x for x in order if not (swaps and isinstance(x, SwapOut | SwapIn))])
        for stage, order in enumerate(schedule.orders)
    )


def require_shape(schedule: Schedule) -> None:
    """Checks that every stage is alone on its device, forward and backward are cut alike, and there
    is one route.

    Raises:
        ConfigError: the schedule has another shape.
    """
    layout = schedule.layout
    stages = range(len(layout.forward))
    fits = (
        layout.num_routes == 1
        and len(layout.forward) == len(layout.backward) == layout.num_devices
        and all(layout.is_coupled(s) and layout.forward[s].device == s for s in stages)
    )
    if not fits:
        raise ConfigError(
            "schedule.passes: the passes of Obscura work on one stage per worker, stage s on"
            f" worker s, one route; {schedule.scheme} is not like that. Use scheme 1f1b"
        )


def _read(stage: int, order: Sequence[OrderedInstruction]) -> StageOrder:
    forwards: list[Forward] = []
    ahead: list[int] = []
    after = RecomputeAfter.CHECKPOINT
    for instruction in order:
        match instruction:
            case Forward(micro_batch=m) if m == len(forwards):
                forwards.append(instruction)
            case Backward(micro_batch=m) if m == len(ahead):
                ahead.append(len(forwards))
            case Recompute(micro_batch=m) if m == len(ahead):
                after = instruction.after
            case _:
                raise ConfigError(
                    f"schedule.passes: the passes of Obscura expect forwards and unsplit backwards"
                    f" in the order of micro-batches; stage {stage} has {instruction}. Apply them"
                    " first, to scheme 1f1b"
                )
    if len(forwards) != len(ahead):
        raise ConfigError(
            f"schedule.passes: the passes of Obscura expect a forward for every backward; stage"
            f" {stage} has {len(forwards)} for {len(ahead)}. Apply skip-dead-forward after them"
        )
    return StageOrder(
        stage=stage, recompute=_recomputation(forwards), ahead=tuple(ahead), after=after
    )


def _recomputation(forwards: Sequence[Forward]) -> Recomputation:
    """Returns the recomputation of all micro-batches of a stage: mixed ones are no shape of
    ours.
    """
    kinds = {(forward.keep, forward.drop) for forward in forwards}
    if len(kinds) != 1:
        raise ConfigError(
            f"schedule.passes: the passes of Obscura expect all forwards of a stage to keep the"
            f" same; stage {forwards[0].stage} has {len(kinds)} kinds"
        )
    keep, drop = kinds.pop()
    if keep is Keep.INPUT:
        return FULL
    return Recomputation(mode="selective", drop=drop) if drop else NONE


def with_orders(schedule: Schedule, orders: Iterable[StageOrder]) -> Schedule:
    """Returns the schedule with these orders."""
    return replace(schedule, orders=tuple(order.instructions() for order in orders))


def adjusted_stages(schedule: Schedule) -> tuple[int, ...]:
    """Returns the adjusted stages of a schedule, read from its orders.

    They recompute fully (before swapping-aware recomputation), or swap, or run more forwards ahead
    than 1F1B does. A stage that only drops operators (CMB-identifying) is not adjusted.
    """
    layout = schedule.layout
    return tuple(
        stage for stage, order in enumerate(schedule.orders) if _is_adjusted(layout, stage, order)
    )


def _is_adjusted(layout: StageLayout, stage: int, order: Order) -> bool:
    usual = min(len(layout.forward) - stage, layout.num_microbatches)
    warmup = 0
    for instruction in order:
        if isinstance(instruction, SwapOut | SwapIn):
            return True
        if isinstance(instruction, Recompute | Backward):
            break
        if isinstance(instruction, Forward):
            if instruction.keep is Keep.INPUT:
                return True
            warmup += 1
    return warmup > usual


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubbles:
    """Idle seconds of a stage: ``forward_s`` before its first backward, ``backward_s`` from there
    to its last (section 2.1). Idle time before the first forward counts as neither.
    """

    forward_s: float
    backward_s: float


def bubbles(schedule: Schedule, times: OrderTimes, stage: int) -> Bubbles:
    """Returns the bubbles of a stage. Recomputation is work, so what it conceals is no bubble."""
    starts, ends = times.starts[stage], times.ends[stage]
    backwards = [i for i, x in enumerate(schedule.orders[stage]) if isinstance(x, Backward)]
    idle = [start - end for start, end in zip(starts[1:], ends[:-1], strict=True)]
    return Bubbles(
        forward_s=added(idle[: backwards[0]]),
        backward_s=added(idle[backwards[0] : backwards[-1]]),
    )
