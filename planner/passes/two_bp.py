"""2BP: splits the backward in two, and puts the weight gradients where devices would wait.

Source: Rae, Lee, Richings, "2BP: 2-Stage Backpropagation", 2024, sections 3 and 4.2. Passes:

- ``split-backward``: B becomes BI and BW.
- ``fill-bubbles``: BW into idle time between BI calls, the rest to the end.
- ``concatenate``: the remaining BW of a stage as one.
- ``2bp``: the three, if shorter.
- ``flush-half`` (figure 5) and ``limit-deferred`` take memory back, since between BI and BW a
  micro-batch's intermediate derivatives stay.

A BW can move back to the end of its device's work, since it reads no weights: streamed ones may be
gone by then. It cannot pass an UPDATE on the device, which needs final gradients. The weight
gradients of a stage are taken in the order of its backwards, so they add up to the same bits as
unsplit. Passes see compute only. Gradients that are final later also reach the optimizer later,
which only a simulation shows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.passes.dispatch import fill_waits, is_less, makespan_s
from penstock.planner.schedule.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.schedule.memory_order import OrderMemory, peak_bytes
from penstock.planner.schedule.schedule import Schedule
from penstock.protocol.plan.instructions import Backward, BackwardInput, BackwardWeight, Update

_Work = tuple[int, int]


def split_backward(schedule: Schedule, context: PassContext) -> Schedule:
    """Turns every BACKWARD into BACKWARD_INPUT, directly followed by its BACKWARD_WEIGHT.

    The schedule never gets slower: the gradient of the input leaves earlier. (Each instruction's
    fixed overhead, where costs have one, is paid twice.)
    """
    del context
    if not any(isinstance(i, Backward) for order in schedule.orders for i in order):
        return schedule
    return replace(schedule, orders=tuple(tuple(_split(order)) for order in schedule.orders))


def _split(order: Order) -> Iterator[OrderedInstruction]:
    for instruction in order:
        if isinstance(instruction, Backward):
            s, m = instruction.stage, instruction.micro_batch
            yield BackwardInput(stage=s, micro_batch=m)
            yield BackwardWeight(stage=s, micro_batches=(m,))
        else:
            yield instruction


def fill_bubbles(schedule: Schedule, context: PassContext) -> Schedule:
    """Delays weight gradients until their device would be idle; those that never fit come last.

    The ways of :class:`~penstock.planner.passes.dispatcher.FillPolicy` are tried; one of them
    delays no forward and no BACKWARD_INPUT at all. The shortest schedule wins, the given one
    included.
    """
    late = fill_waits(_deferred(schedule), context, (BackwardWeight,), eager=True)
    shorter = is_less(makespan_s(late, context), makespan_s(schedule, context))
    return late if shorter else schedule


def _deferred(schedule: Schedule) -> Schedule:
    """Returns the schedule with all weight gradients as late as they can be, one
    instruction each.
    """
    orders: list[Order] = []
    for order in schedule.orders:
        single = tuple(_one_each(order))
        orders.append(_move_back(single, _latest_places(single, schedule.layout)))
    return replace(schedule, orders=tuple(orders))


def _one_each(order: Order) -> Iterator[OrderedInstruction]:
    for instruction in order:
        if isinstance(instruction, BackwardWeight):
            for m in instruction.micro_batches:
                yield BackwardWeight(stage=instruction.stage, micro_batches=(m,))
        else:
            yield instruction


def _latest_places(order: Order, layout: StageLayout) -> dict[int, int]:
    """Returns, for each BACKWARD_WEIGHT, the position before which it must have run."""
    places: dict[int, int] = {}
    updates = {i.block: p for p, i in enumerate(order) if isinstance(i, Update)}
    for position, instruction in enumerate(order):
        if isinstance(instruction, BackwardWeight):
            blocks = layout.backward[instruction.stage].blocks
            places[position] = min((updates[b] for b in blocks if b in updates), default=len(order))
    return places


def _move_back(order: Order, places: Mapping[int, int]) -> Order:
    moved: dict[int, list[OrderedInstruction]] = defaultdict(list)
    result: list[OrderedInstruction] = []
    for position, instruction in enumerate(order):
        result += moved[position]
        if position in places:
            moved[places[position]].append(instruction)
        else:
            result.append(instruction)
    return (*result, *moved[len(order)])


def concatenate(schedule: Schedule, context: PassContext) -> Schedule:
    """Joins what is left of a stage's weight gradients after its last BACKWARD_INPUT into one call.

    Stages follow each other as they did, the one that started first in front: its gradients are
    final first.
    """
    del context
    orders = tuple(_concatenated(order) for order in schedule.orders)
    return replace(schedule, orders=orders) if orders != schedule.orders else schedule


def _concatenated(order: Order) -> Order:
    last_input = {i.stage: p for p, i in enumerate(order) if isinstance(i, BackwardInput)}
    result: list[OrderedInstruction] = []
    block: dict[int, tuple[int, ...]] = {}
    for position, instruction in enumerate(order):
        if isinstance(instruction, BackwardWeight) and position > last_input[instruction.stage]:
            block[instruction.stage] = block.get(instruction.stage, ()) + instruction.micro_batches
        else:
            result += _calls(block)
            block = {}
            result.append(instruction)
    return (*result, *_calls(block))


def _calls(batches_of_stage: dict[int, tuple[int, ...]]) -> list[BackwardWeight]:
    return [
        BackwardWeight(stage=stage, micro_batches=batches)
        for stage, batches in batches_of_stage.items()
    ]


def two_bp(schedule: Schedule, context: PassContext) -> Schedule:
    """Splits, fills and concatenates; returns the given schedule if the result is not shorter.

    The result keeps the context's memory limit, if the given schedule does. It keeps the memory of
    the given schedule if that takes no longer.
    """
    result = schedule
    for one in (split_backward, fill_bubbles, concatenate, limit_deferred):
        result = one(result, context)
    peaks = peak_bytes(schedule.layout, schedule.residency, context.costs, schedule.orders)
    frugal = limit_deferred(result, replace(context, memory_limit_bytes=max(peaks, default=0.0)))
    result_s = makespan_s(result, context)
    if not is_less(result_s, makespan_s(frugal, context)):
        result = frugal
    return result if is_less(result_s, makespan_s(schedule, context)) else schedule


def flush_half(schedule: Schedule, context: PassContext) -> Schedule:
    """Runs, half-way through the backwards of a device, all weight gradients that are left so far.

    This is the paper's figure 5, for 1F1B-2. A device then keeps the intermediate derivatives of
    half of its micro-batches at most. The makespan is longer if the devices before it wait.
    """
    del context
    return replace(schedule, orders=tuple(tuple(_flushed(order)) for order in schedule.orders))


def _flushed(order: Order) -> Iterator[OrderedInstruction]:
    half = sum(isinstance(i, BackwardInput) for i in order) // 2
    seen = 0
    pending: dict[_Work, None] = {}
    for instruction in order:
        yield from _what_is_left(instruction, pending)
        if isinstance(instruction, BackwardInput):
            seen += 1
            if seen == half:
                yield from _catch_up(pending, len(pending))


def limit_deferred(schedule: Schedule, context: PassContext) -> Schedule:
    """Takes weight gradients earlier, so that no device exceeds its memory.

    The limit is the context's ``memory_limit_bytes``, for the bytes that
    :mod:`penstock.planner.schedule.memory_order` counts. A schedule that exceeds it with nothing
    deferred still does: this pass only gives back the memory that 2BP took. It returns the shortest
    of three ways.

    - Weight gradients stay in place, but the oldest run at once whenever memory would not suffice.
    - Each runs as many BACKWARD_INPUT later as memory allows on its device, or earlier if the
      device waits. With a lag of d on device d this is ZB-H1.
    - Each runs at once.
    """
    limit_bytes = context.memory_limit_bytes
    if limit_bytes is None:
        return schedule
    limited: list[Order] = []
    lagging: list[Order] = []
    for device, order in enumerate(schedule.orders):
        empty = partial(OrderMemory.of, schedule.layout, schedule.residency, context.costs, device)
        limited.append(tuple(_limited(order, empty(), limit_bytes)))
        lagging.append(_with_lag(order, empty, limit_bytes))
    if tuple(limited) == schedule.orders:
        return schedule
    late = replace(schedule, orders=tuple(lagging))
    filled = fill_waits(late, context, (BackwardWeight,), eager=True)
    at_once = replace(schedule, orders=tuple(tuple(_lagged(o, 0)) for o in schedule.orders))
    ways = (replace(schedule, orders=tuple(limited)), concatenate(filled, context), at_once)
    return min(ways, key=lambda way: makespan_s(way, context))


def _with_lag(order: Order, empty: Callable[[], OrderMemory], limit_bytes: float) -> Order:
    """Returns the order with the longest lag that memory allows."""
    count = sum(isinstance(i, BackwardInput) for i in order)
    too_long = bisect_left(
        range(1, count), True, key=lambda lag: empty().peak_of(_lagged(order, lag)) > limit_bytes
    )
    return tuple(_lagged(order, too_long))


def _lagged(order: Order, lag: int) -> Iterator[OrderedInstruction]:
    """Yields every BACKWARD_WEIGHT ``lag`` of its device's BACKWARD_INPUT later, and the rest at
    the end.
    """
    pending: dict[_Work, None] = {}
    for instruction in order:
        if isinstance(instruction, Update):
            yield from _catch_up(pending, len(pending))
        if isinstance(instruction, BackwardInput):
            pending[instruction.stage, instruction.micro_batch] = None
        if not isinstance(instruction, BackwardWeight):
            yield instruction
        while len(pending) > lag:
            yield from _catch_up(pending, 1)
    while pending:
        yield from _catch_up(pending, 1)


def _limited(order: Order, memory: OrderMemory, limit_bytes: float) -> Iterator[OrderedInstruction]:
    pending: dict[_Work, None] = {}
    for instruction in order:
        while (
            pending
            and not isinstance(instruction, BackwardWeight)
            and memory.needed_bytes(instruction) > limit_bytes
        ):
            for call in _catch_up(pending, 1):
                memory.apply(call)
                yield call
        for left in _what_is_left(instruction, pending):
            memory.apply(left)
            yield left


def _catch_up(pending: dict[_Work, None], count: int) -> list[BackwardWeight]:
    """Returns the weight gradients of the oldest ``count`` pending, one call per stage, and takes
    them from ``pending``.
    """
    batches: dict[int, tuple[int, ...]] = {}
    for stage, micro_batch in list(pending)[:count]:
        batches[stage] = (*batches.get(stage, ()), micro_batch)
        del pending[stage, micro_batch]
    return _calls(batches)


def _what_is_left(
    instruction: OrderedInstruction, pending: dict[_Work, None]
) -> Iterator[OrderedInstruction]:
    """Yields the instruction without weight gradients that were caught up with, and keeps
    ``pending``.
    """
    if isinstance(instruction, BackwardInput):
        pending[instruction.stage, instruction.micro_batch] = None
    if not isinstance(instruction, BackwardWeight):
        yield instruction
        return
    s = instruction.stage
    left = tuple(m for m in instruction.micro_batches if (s, m) in pending)
    for m in left:
        del pending[s, m]
    if left:
        yield BackwardWeight(stage=s, micro_batches=left)


PASSES = (
    Pass(
        name="split-backward",
        summary="gradients of inputs first, of weights right after (2BP, section 3)",
        run=split_backward,
    ),
    Pass(
        name="fill-bubbles",
        summary="gradients of weights while devices wait, the rest last (2BP, section 3.2)",
        run=fill_bubbles,
    ),
    Pass(
        name="concatenate",
        summary="one call for what is left of a stage's weight gradients (2BP, figure 2)",
        run=concatenate,
    ),
    Pass(
        name="2bp",
        summary="split-backward, fill-bubbles and concatenate, if that is shorter",
        run=two_bp,
    ),
    Pass(
        name="flush-half",
        summary="catch up with weight gradients half-way, for memory (2BP, figure 5)",
        run=flush_half,
    ),
    Pass(
        name="limit-deferred",
        summary="catch up with weight gradients when --memory is short (2BP, section 4.2)",
        run=limit_deferred,
    ),
)
