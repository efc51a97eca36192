"""Fill the time in which devices wait: run later instructions of an order ahead of their turn.

A simulation in which every device decides what it runs next. The first instruction of its order
that is left runs as soon as its inputs are there. While it waits, a *filler* may run: a later
instruction of a movable kind whose inputs are there. So only the place of fillers changes; all
other instructions, and fillers of the same stage among themselves, keep their order.

What passes make of it: :mod:`penstock.planner.passes.mario` moves forwards and recomputations,
:mod:`penstock.planner.passes.two_bp` weight gradients. Times are those of
:mod:`penstock.planner.timing`: compute, and one latency per hop.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from penstock.planner.layout import Order, OrderedInstruction, StageLayout, skipped_forwards
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.order_memory import OrderMemory, peak_bytes
from penstock.planner.schedule import Schedule
from penstock.planner.timing import makes, needs, order_times, seconds_of
from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Recompute,
    SwapIn,
)

_Key = tuple[str, int, int]

_ROUNDING = 1e-9
"""Times that differ by less, relatively, count as the same."""


class Filling(StrEnum):
    """Which fillers may run while the first instruction that is left waits."""

    IN_GAPS = "in gaps"
    """Those that end before that instruction started so far: nothing starts later than it did."""
    IF_KNOWN = "if known"
    """Those that end before that instruction can start, if this is known by then; else all."""
    ALWAYS = "always"
    """All."""


def makespan_s(schedule: Schedule, context: PassContext) -> float:
    """Seconds until the last instruction of a schedule ends."""
    times = order_times(schedule.layout, schedule.orders, context.costs, hop_s=context.hop_s)
    return times.makespan_s


def is_less(left_s: float, right_s: float) -> bool:
    """Less by more than rounding."""
    return left_s < right_s - _ROUNDING * abs(right_s)


def fill_waits(
    schedule: Schedule,
    context: PassContext,
    movable: tuple[type[OrderedInstruction], ...],
    *,
    eager: bool = False,
) -> Schedule:
    """The shortest of the schedules that each :class:`Filling` makes, repeated while it helps.

    Returns the same schedule where none is shorter, or where those that are need more memory than
    the context's limit (and than this one). ``movable``: FORWARD (those that keep no graph, so that
    preposing them costs a checkpoint only), RECOMPUTE (ahead of forwards, never of another backward
    or recomputation, so that one micro-batch's activations exist at a time), or BACKWARD_WEIGHT.
    ``eager``: fill waits where that is only as short, too.
    """
    best_s = makespan_s(schedule, context)
    while True:
        found = [
            replace(schedule, orders=_Dispatcher(schedule, context, movable, filling).run())
            for filling in Filling
        ]
        times = {
            index: makespan_s(candidate, context)
            for index, candidate in enumerate(found)
            if _has_room(candidate, schedule, context)
        }
        fastest = min(times, key=times.__getitem__, default=0)
        found_s = times.get(fastest, inf)
        if not is_less(found_s, best_s):
            return found[fastest] if eager and not is_less(best_s, found_s) else schedule
        schedule, best_s = found[fastest], found_s


def _has_room(candidate: Schedule, schedule: Schedule, context: PassContext) -> bool:
    if context.memory_limit_bytes is None:
        return True
    peaks = [
        peak_bytes(s.layout, s.residency, context.costs, s.orders) for s in (candidate, schedule)
    ]
    limit = context.memory_limit_bytes
    return all(new <= max(limit, old) for new, old in zip(*peaks, strict=True))


@dataclass(slots=True, kw_only=True)
class _Device:
    """An order, what of it is done, and the order that it becomes.

    ``lanes``: positions of instructions that keep their order among themselves; of each the first
    that is left may be a filler, if it ``may_move``. ``backwards``: positions of recomputations and
    backwards, whose order never changes. ``latest_s``: when each instruction started so far.
    """

    order: Order
    seconds: tuple[float, ...]
    inputs: tuple[tuple[_Key, ...], ...]
    latest_s: tuple[float, ...]
    may_move: tuple[bool, ...]
    lanes: tuple[deque[int], ...]
    backwards: deque[int]
    done: list[bool]
    head: int = 0
    free_s: float = 0.0
    chosen: list[OrderedInstruction] = field(default_factory=list)

    def skip_done(self) -> bool:
        """Move on to the first instruction that is left; whether there is one."""
        while self.head < len(self.order) and self.done[self.head]:
            self.head += 1
        for queue in (self.backwards, *self.lanes):
            while queue and self.done[queue[0]]:
                queue.popleft()
        return self.head < len(self.order)

    def fillers(self) -> Iterator[int]:
        """Positions behind the head that may be taken next, in order."""
        for position in sorted(lane[0] for lane in self.lanes if lane):
            in_turn = (
                not isinstance(self.order[position], Recompute) or position == self.backwards[0]
            )
            if position != self.head and self.may_move[position] and in_turn:
                yield position


@dataclass(slots=True, kw_only=True)
class _Room:
    """The memory of a device. ``graph_bytes``: what a recomputation makes at most.

    ``recomputed``: a recomputation waits for its backward.
    """

    memory: OrderMemory
    limit_bytes: float
    graph_bytes: float
    recomputed: bool = False

    def admits(self, filler: OrderedInstruction) -> bool:
        """A forward ahead of its turn leaves room for the next recomputation."""
        if isinstance(filler, BackwardWeight):
            return True
        needed_bytes = self.memory.needed_bytes(filler)
        if isinstance(filler, Forward) and not self.recomputed:
            needed_bytes += self.graph_bytes
        return needed_bytes <= self.limit_bytes

    def apply(self, instruction: OrderedInstruction) -> None:
        """Run an instruction."""
        self.memory.apply(instruction)
        if isinstance(instruction, _BACKWARDS):
            self.recomputed = isinstance(instruction, Recompute)


def _rooms(schedule: Schedule, context: PassContext) -> list[_Room]:
    """One per device; none where memory is no limit."""
    if context.memory_limit_bytes is None:
        return []
    rooms: list[_Room] = []
    for device in range(schedule.layout.num_devices):
        stages = [schedule.layout.backward[b] for b in schedule.layout.backward_stages_on(device)]
        graphs = (context.costs.of(stage.blocks).activation_bytes for stage in stages)
        memory = OrderMemory.of(schedule.layout, schedule.residency, context.costs, device)
        rooms.append(
            _Room(
                memory=memory,
                limit_bytes=context.memory_limit_bytes,
                graph_bytes=max(graphs, default=0.0),
            )
        )
    return rooms


class _Dispatcher:
    """One simulation; :meth:`run` may be called once."""

    def __init__(
        self,
        schedule: Schedule,
        context: PassContext,
        movable: tuple[type[OrderedInstruction], ...],
        filling: Filling,
    ) -> None:
        layout, orders = schedule.layout, schedule.orders
        self._filling = filling
        self._rooms = _rooms(schedule, context)
        self._hop_s = context.hop_s
        self._ended: dict[_Key, tuple[float, int]] = {}
        skipped = skipped_forwards(layout, orders)
        times = order_times(layout, orders, context.costs, hop_s=context.hop_s)
        seconds = seconds_of(layout, context.costs)
        self._devices = [
            _Device(
                order=order,
                seconds=tuple(map(seconds, order)),
                inputs=tuple(tuple(_inputs(layout, i, skipped)) for i in order),
                latest_s=latest_s,
                may_move=_may_move(order, movable),
                lanes=_lanes(order),
                backwards=deque(p for p, i in enumerate(order) if isinstance(i, _BACKWARDS)),
                done=[False] * len(order),
            )
            for order, latest_s in zip(orders, times.starts, strict=True)
        ]
        self._users: dict[_Key, set[int]] = defaultdict(set)
        for number, device in enumerate(self._devices):
            for keys in device.inputs:
                for key in keys:
                    self._users[key].add(number)

    def run(self) -> tuple[Order, ...]:
        """The new orders."""
        events = [(0.0, number) for number in range(len(self._devices))]
        while events:
            now_s, number = heapq.heappop(events)
            device = self._devices[number]
            if device.free_s > now_s or not device.skip_done():
                continue
            position, wake_s = self._choose(number, now_s)
            if position is not None:
                for event in self._start(number, position, now_s):
                    heapq.heappush(events, event)
            elif wake_s is not None:
                heapq.heappush(events, (wake_s, number))
        return tuple(tuple(device.chosen) for device in self._devices)

    def _choose(self, number: int, now_s: float) -> tuple[int | None, float | None]:
        """What to start now; else when to look again, as far as that is known."""
        device = self._devices[number]
        ready_s = self._ready_s(number, device.head)
        if ready_s is not None and ready_s <= now_s:
            return device.head, None
        wake_s = ready_s
        for position in device.fillers():
            filler_s = self._ready_s(number, position)
            if filler_s is None or not self._fits(device, position, max(filler_s, now_s), ready_s):
                continue
            if self._rooms and not self._rooms[number].admits(device.order[position]):
                continue
            if filler_s <= now_s:
                return position, None
            wake_s = filler_s if wake_s is None else min(wake_s, filler_s)
        return None, wake_s

    def _fits(self, device: _Device, position: int, start_s: float, ready_s: float | None) -> bool:
        if self._filling is Filling.ALWAYS:
            return True
        limit_s = device.latest_s[device.head] if self._filling is Filling.IN_GAPS else ready_s
        return limit_s is None or not is_less(limit_s, start_s + device.seconds[position])

    def _start(self, number: int, position: int, now_s: float) -> Iterator[tuple[float, int]]:
        """Book an instruction; who may go on when it has ended."""
        device = self._devices[number]
        device.done[position] = True
        device.free_s = now_s + device.seconds[position]
        device.chosen.append(device.order[position])
        if self._rooms:
            self._rooms[number].apply(device.order[position])
        yield device.free_s, number
        for key in makes(device.order[position]):
            self._ended[key] = (device.free_s, number)
            for user in self._users[key]:
                if user != number:
                    yield device.free_s + self._hop_s, user

    def _ready_s(self, number: int, position: int) -> float | None:
        """When the inputs of an instruction are there; ``None`` while somebody has yet to start."""
        ready_s = 0.0
        for key in self._devices[number].inputs[position]:
            made = self._ended.get(key)
            if made is None:
                return None
            ready_s = max(ready_s, made[0] + (self._hop_s if made[1] != number else 0.0))
        return ready_s


_BACKWARDS = (Recompute, Backward, BackwardInput)


def _inputs(
    layout: StageLayout, instruction: OrderedInstruction, skipped: frozenset[tuple[int, int]]
) -> Iterator[_Key]:
    """What must be made first: more than the data, for what leaves its place in an order."""
    yield from needs(layout, instruction, skipped)
    if isinstance(instruction, Recompute) and layout.is_coupled(instruction.stage):
        work = (instruction.stage, instruction.micro_batch)
        if work not in skipped:
            yield "F", *work


def _may_move(order: Order, movable: tuple[type[OrderedInstruction], ...]) -> tuple[bool, ...]:
    swapped = {(i.stage, i.micro_batch) for i in order if isinstance(i, SwapIn)}

    def moves(instruction: OrderedInstruction) -> bool:
        match instruction:
            case Forward(keep=keep):
                return keep is Keep.INPUT
            case Recompute(stage=stage, micro_batch=micro_batch):
                return (stage, micro_batch) not in swapped
        return True

    return tuple(isinstance(i, movable) and moves(i) for i in order)


def _lanes(order: Order) -> tuple[deque[int], ...]:
    """Forwards by stage, weight gradients by stage, all recomputations."""
    lanes: dict[tuple[str, int], deque[int]] = defaultdict(deque)
    for position, instruction in enumerate(order):
        match instruction:
            case Forward(stage=stage) | BackwardWeight(stage=stage):
                lanes[instruction.opcode, stage].append(position)
            case Recompute():
                lanes[instruction.opcode, 0].append(position)
    return tuple(lanes.values())
