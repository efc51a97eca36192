"""The simulation behind :mod:`penstock.planner.passes.dispatch`: devices decide what they run next.

It is run many times for one schedule. So a :class:`Board` keeps what does not change from run to
run, and what instructions make and need are numbers.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, pairwise
from typing import Protocol

from penstock.planner.passes.base import PassContext
from penstock.planner.schedule.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.schedule.timing import Maker, maker_of, needs, seconds_of
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Phase,
    Recompute,
    SwapIn,
)
from penstock.protocol.plan.resources import PlanFacts

_ROUNDING = 1e-9
"""Times with a smaller relative difference count as the same."""

BACKWARDS = (Recompute, Backward, BackwardInput)
"""Instructions that keep their order on a device, while others move around them."""


def is_less(left_s: float, right_s: float) -> bool:
    """Returns whether the left time is shorter by more than rounding."""
    return left_s < right_s - _ROUNDING * abs(right_s)


class FillPolicy(StrEnum):
    """Fillers that may run while the first instruction that is left waits."""

    IN_GAPS = "in gaps"
    """Only fillers that end before that instruction started so far: nothing starts later than it
    did.
    """
    IF_KNOWN = "if known"
    """Only fillers that end before that instruction can start, if this is known by then;
    else all.
    """
    ALWAYS = "always"
    """All fillers."""


class FillerMemory(Protocol):
    """The memory of a device, as fillers see it."""

    def admits(self, filler: OrderedInstruction) -> bool:
        """Returns whether memory has room for a filler now."""

    def apply(self, instruction: OrderedInstruction) -> None:
        """Counts an instruction that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """The instructions that stand in line for a device, and what deciding needs of each.

    ``makes`` and ``inputs``: numbers of what it makes (-1: nothing) and of what it waits for.
    ``lanes``: instructions of one lane (-1: none) keep their order among themselves. ``may_move``:
    the instruction can be a filler when it is the first that is left in its lane.
    """

    order: Order
    seconds: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]
    makes: tuple[int, ...]
    lanes: tuple[int, ...]
    may_move: tuple[bool, ...]

    def permuted(self, positions: Sequence[int]) -> DeviceLine:
        """Returns the same instructions in another order."""
        return DeviceLine(
            order=tuple([self.order[p] for p in positions]),
            seconds=tuple([self.seconds[p] for p in positions]),
            inputs=tuple([self.inputs[p] for p in positions]),
            makes=tuple([self.makes[p] for p in positions]),
            lanes=tuple([self.lanes[p] for p in positions]),
            may_move=tuple([self.may_move[p] for p in positions]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The lines of all devices. ``users``: the devices that wait for each number. ``hop_s``:
    seconds from one device to the next.
    """

    lines: tuple[DeviceLine, ...]
    users: tuple[tuple[int, ...], ...]
    hop_s: float

    @classmethod
    def of(
        cls,
        layout: StageLayout,
        orders: Sequence[Order],
        context: PassContext,
        movable: tuple[type[OrderedInstruction], ...],
    ) -> Board:
        """Returns a board on which fillers are of the ``movable`` kinds."""
        numbers: dict[Maker, int] = defaultdict(count().__next__)
        facts = PlanFacts.of(layout, orders)
        seconds = seconds_of(facts, context.costs)
        lines = tuple(
            DeviceLine(
                order=order,
                seconds=tuple(map(seconds, order)),
                inputs=tuple(tuple([numbers[key] for key in _inputs(facts, i)]) for i in order),
                makes=tuple([-1 if (m := maker_of(i)) is None else numbers[m] for i in order]),
                lanes=tuple(map(_lane, order)),
                may_move=_may_move(order, movable),
            )
            for order in orders
        )
        users: list[dict[int, None]] = [{} for _ in numbers]
        for device, line in enumerate(lines):
            for inputs in line.inputs:
                for number in inputs:
                    users[number][device] = None
        return cls(lines=lines, users=tuple(map(tuple, users)), hop_s=context.hop_s)

    def permuted(self, run: Dispatched) -> Board:
        """Returns the board on which every device does what it did in a run."""
        lines = tuple(
            line.permuted(places) for line, places in zip(self.lines, run.positions, strict=True)
        )
        return Board(lines=lines, users=self.users, hop_s=self.hop_s)

    @property
    def orders(self) -> tuple[Order, ...]:
        """The orders of all devices."""
        return tuple(line.order for line in self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """The positions of each device's queue in the order of their run, and the start of each."""

    positions: tuple[tuple[int, ...], ...]
    starts_s: tuple[tuple[float, ...], ...]
    makespan_s: float

    @property
    def moved(self) -> bool:
        """True if a filler ran ahead of its turn."""
        return any(left > right for line in self.positions for left, right in pairwise(line))


@dataclass(slots=True, kw_only=True)
class _Device:
    """A line, and what of it is done.

    ``lanes`` and ``backwards``: positions that are left, of each lane and of :data:`BACKWARDS`.
    ``latest_s``: when each instruction started so far.
    """

    line: DeviceLine
    latest_s: Sequence[float]
    lanes: tuple[deque[int], ...]
    backwards: deque[int]
    done: list[bool]
    head: int = 0
    free_s: float = 0.0
    chosen: list[int] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, line: DeviceLine, latest_s: Sequence[float]) -> _Device:
        lanes: dict[int, deque[int]] = defaultdict(deque)
        for position, lane in enumerate(line.lanes):
            if lane >= 0:
                lanes[lane].append(position)
        backwards = (p for p, i in enumerate(line.order) if isinstance(i, BACKWARDS))
        return cls(
            line=line,
            latest_s=latest_s,
            lanes=tuple(lanes.values()),
            backwards=deque(backwards),
            done=[False] * len(line.order),
        )

    def skip_done(self) -> bool:
        """Moves on to the first instruction that is left; returns whether there is one."""
        done = self.done
        while self.head < len(done) and done[self.head]:
            self.head += 1
        return self.head < len(done)

    def fillers(self) -> Iterator[int]:
        """Yields the positions behind the head that may be taken next, in order."""
        done = self.done
        for queue in (self.backwards, *self.lanes):
            while queue and done[queue[0]]:
                queue.popleft()
        for position in sorted([lane[0] for lane in self.lanes if lane]):
            if position != self.head and self.line.may_move[position]:
                recompute = isinstance(self.line.order[position], Recompute)
                if not recompute or position == self.backwards[0]:
                    yield position


class Dispatcher:
    """One simulation; :meth:`run` may be called once.

    ``latest_s``: when the instructions of each line started so far. ``memories``: of each device,
    nothing where memory is no limit.
    """

    def __init__(
        self,
        board: Board,
        latest_s: Sequence[Sequence[float]],
        filling: FillPolicy,
        memories: Sequence[FillerMemory] = (),
    ) -> None:
        self._board = board
        self._filling = filling
        self._memories = memories
        self._made_s: list[float | None] = [None] * len(board.users)
        self._made_by = [-1] * len(board.users)
        self._devices = [
            _Device.of(line, starts_s) for line, starts_s in zip(board.lines, latest_s, strict=True)
        ]

    def run(self) -> Dispatched:
        """Runs everything."""
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
        return Dispatched(
            positions=tuple(tuple(device.chosen) for device in self._devices),
            starts_s=tuple(tuple(device.starts_s) for device in self._devices),
            makespan_s=max((device.free_s for device in self._devices), default=0.0),
        )

    def _choose(self, number: int, now_s: float) -> tuple[int | None, float | None]:
        """Returns the instruction to start now; otherwise the moment of the next check, if it is
        known.
        """
        device = self._devices[number]
        ready_s = self._ready_s(number, device.head)
        if ready_s is not None and ready_s <= now_s:
            return device.head, None
        wake_s = ready_s
        for position in device.fillers():
            filler_s = self._ready_s(number, position)
            if filler_s is None or not self._fits(device, position, max(filler_s, now_s), ready_s):
                continue
            if self._memories and not self._memories[number].admits(device.line.order[position]):
                continue
            if filler_s <= now_s:
                return position, None
            wake_s = filler_s if wake_s is None else min(wake_s, filler_s)
        return None, wake_s

    def _fits(self, device: _Device, position: int, start_s: float, ready_s: float | None) -> bool:
        if self._filling is FillPolicy.ALWAYS:
            return True
        limit_s = device.latest_s[device.head] if self._filling is FillPolicy.IN_GAPS else ready_s
        return limit_s is None or not is_less(limit_s, start_s + device.line.seconds[position])

    def _start(self, number: int, position: int, now_s: float) -> Iterator[tuple[float, int]]:
        """Books an instruction; yields moments and devices at which an instruction may go on."""
        device = self._devices[number]
        device.done[position] = True
        device.free_s = end_s = now_s + device.line.seconds[position]
        device.chosen.append(position)
        device.starts_s.append(now_s)
        if self._memories:
            self._memories[number].apply(device.line.order[position])
        yield end_s, number
        made = device.line.makes[position]
        if made >= 0:
            self._made_s[made] = end_s
            self._made_by[made] = number
            for user in self._board.users[made]:
                if user != number:
                    yield end_s + self._board.hop_s, user

    def _ready_s(self, number: int, position: int) -> float | None:
        """Returns when the inputs of an instruction are there, ``None`` while one of their makers
        has yet to start.
        """
        ready_s = 0.0
        for made in self._devices[number].line.inputs[position]:
            made_s = self._made_s[made]
            if made_s is None:
                return None
            if self._made_by[made] != number:
                made_s += self._board.hop_s
            if made_s > ready_s:
                ready_s = made_s
        return ready_s


def _inputs(facts: PlanFacts, instruction: OrderedInstruction) -> Iterator[Maker]:
    """Yields what must be made first: more than the data, for what leaves its place in an order."""
    yield from needs(facts, instruction)
    if isinstance(instruction, Recompute) and facts.layout.is_coupled(instruction.stage):
        work = (instruction.stage, instruction.micro_batch)
        if work not in facts.skipped:
            yield Phase.FORWARD, *work


def _may_move(order: Order, movable: tuple[type[OrderedInstruction], ...]) -> tuple[bool, ...]:
    swapped = {(i.stage, i.micro_batch) for i in order if isinstance(i, SwapIn)}

    def moves(instruction: OrderedInstruction) -> bool:
        match instruction:
            case Forward(keep=keep):
                return keep is Keep.INPUT
            case Recompute(stage=stage, micro_batch=micro_batch):
                return (stage, micro_batch) not in swapped
        return True

    return tuple([isinstance(i, movable) and moves(i) for i in order])


def _lane(instruction: OrderedInstruction) -> int:
    """Returns the lane of an instruction: one for all recomputations, one per stage for forwards
    and for weight gradients.
    """
    match instruction:
        case Forward(stage=stage):
            return 1 + 2 * stage
        case BackwardWeight(stage=stage):
            return 2 + 2 * stage
        case Recompute():
            return 0
    return -1
