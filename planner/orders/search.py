"""Distance of orders from the best possible ones, as a number.

:func:`search` finds the order of a schedule's instructions with the least makespan if only compute
takes time (:func:`penstock.planner.schedule.timing.order_times`). The memory of each device is
limited. Two simple rules and a beam search find good orders. Branch and bound, best bound first,
goes on until the best is proved or a limit ends the search. Up to a few dozen instructions the
proof is usually immediate, because the bound meets the order.
:mod:`penstock.planner.orders.sequencing` has the problem, the branching and the bound;
micro-batches keep their order.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.host.errors import ConfigError
from penstock.host.sums import added
from penstock.planner.cost.costs import Costs
from penstock.planner.orders.sequencing import Problem, State
from penstock.planner.schedule.layout import ComputeInstruction, Order, Residency, StageLayout
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import order_times
from penstock.planner.schemes.base import Recomputation, RecomputeMode, backward_weight
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
)

_Rank = tuple[float, int, float, int]

_FEW_JOBS = 128
"""Up to so many the beam can afford the full bound."""

_PREFERENCES: tuple[tuple[type[ComputeInstruction], ...], ...] = (
    (Backward, BackwardInput, Recompute, Forward, BackwardWeight),
    (Forward, Backward, BackwardInput, Recompute, BackwardWeight),
)
"""Backwards first, as 1F1B and zero-bubble do, and forwards first, as GPipe does."""

_TOLERANCE = 1e-9
"""Makespans that differ by less, relatively, are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of a search: states kept at each step of the beam, states that branch and bound
    visits, and seconds in all. A limit of states gives the same result on every machine.
    """

    beam_width: int = 24
    max_states: int = 100_000
    time_limit_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best orders of a search. ``optimal``: no order is better; then the bound is exact.

    ``states``: number of partial solutions that branch and bound visited.
    """

    orders: tuple[Order, ...]
    makespan_s: float
    lower_bound_s: float
    optimal: bool
    states: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Compares a schedule's makespan with the best that was found and what none can beat."""

    makespan_s: float
    best: SearchResult

    @property
    def at_least(self) -> float:
        """The schedule takes at least so much longer than the best possible one, as a ratio."""
        return self.makespan_s / self.best.makespan_s - 1.0

    @property
    def at_most(self) -> float:
        """The schedule takes at most so much longer. Equal to :attr:`at_least` where the best was
        proved.
        """
        return self.makespan_s / self.best.lower_bound_s - 1.0


def search(
    layout: StageLayout,
    costs: Costs,
    *,
    recompute: RecomputeMode = "none",
    drop: tuple[str, ...] = (),
    split_backward: bool = False,
    residency: Residency = Residency.RESIDENT,
    memory_limit_bytes: float | None = None,
    hop_s: float = 0.0,
    effort: Effort | None = None,
) -> SearchResult:
    """Searches the best orders of one forward and one backward per stage and micro-batch.

    ``split_backward``: backwards are BACKWARD_INPUT and BACKWARD_WEIGHT. ``recompute``, ``drop``:
    what all forwards keep. ``memory_limit_bytes``: of each device, counted by
    :mod:`penstock.planner.schedule.memory_order`; ``hop_s``: from one device to another.

    Raises:
        ConfigError: no order within the memory limit was found.
    """
    orders = _unordered(layout, Recomputation(mode=recompute, drop=drop), split_backward)
    problem = Problem.of(
        layout,
        orders,
        costs,
        residency=residency,
        memory_limit_bytes=memory_limit_bytes,
        hop_s=hop_s,
    )
    return _solve(problem, effort or Effort(), incumbent=None)


def gap(
    schedule: Schedule,
    costs: Costs,
    *,
    memory_limit_bytes: float | None = None,
    hop_s: float = 0.0,
    effort: Effort | None = None,
) -> Gap:
    """Returns how far a schedule is from the best order of its instructions on their devices.

    What is recomputed and where stages are is not up to the search; BACKWARD_WEIGHTs of several
    micro-batches may be taken apart, swaps and updates take no time.

    Raises:
        ValueError: the orders cannot finish.
        ConfigError: the schedule itself is over the memory limit.
    """
    _check_memory(schedule, costs, memory_limit_bytes)
    makespan_s = order_times(schedule.layout, schedule.orders, costs, hop_s=hop_s).makespan_s
    problem = Problem.of(
        schedule.layout,
        schedule.orders,
        costs,
        residency=schedule.residency,
        memory_limit_bytes=memory_limit_bytes,
        hop_s=hop_s,
    )
    kept_orders = tuple(
        tuple(i for i in order if isinstance(i, ComputeInstruction)) for order in schedule.orders
    )
    best = _solve(problem, effort or Effort(), incumbent=(kept_orders, makespan_s))
    return Gap(makespan_s=makespan_s, best=best)


def _check_memory(schedule: Schedule, costs: Costs, limit: float | None) -> None:
    """Refuses orders over the limit, which cannot be compared with orders below it.

    Raises:
        ConfigError: the orders are over the limit.
    """
    peaks = peak_bytes(schedule.layout, schedule.residency, costs, schedule.orders)
    peak = max(peaks)
    if limit is not None and peak > limit:
        raise ConfigError(
            f"memory limit of {limit:.6g} bytes a device: {schedule.scheme} holds"
            f" {peak:.6g} bytes on device {peaks.index(peak)}; search() finds orders below it"
        )


def _unordered(
    layout: StageLayout, recomputation: Recomputation, split_backward: bool
) -> tuple[Order, ...]:
    """Returns every instruction on its device, in no particular order."""
    orders: list[list[ComputeInstruction]] = [[] for _ in range(layout.num_devices)]
    for stage, (place, route) in enumerate(zip(layout.forward, layout.forward_routes, strict=True)):
        for m in layout.microbatches_of_route[route]:
            orders[place.device].append(recomputation.forward(stage, m))
    for stage, (place, route) in enumerate(
        zip(layout.backward, layout.backward_routes, strict=True)
    ):
        for m in layout.microbatches_of_route[route]:
            for instruction in recomputation.backward(stage, m):
                orders[place.device] += _split(instruction) if split_backward else (instruction,)
    return tuple(map(tuple, orders))


def _split(instruction: ComputeInstruction) -> Iterator[ComputeInstruction]:
    if not isinstance(instruction, Backward):
        yield instruction
        return
    stage, micro_batch = instruction.stage, instruction.micro_batch
    yield BackwardInput(stage=stage, micro_batch=micro_batch)
    yield backward_weight(stage, micro_batch)


def _solve(
    problem: Problem, effort: Effort, incumbent: tuple[tuple[Order, ...], float] | None
) -> SearchResult:
    """Tries simple rules and a beam, then branches and bounds below the best of these and the
    incumbent.
    """
    started_s = time.monotonic()
    tree = _Tree(problem, best_s=inf if incumbent is None else incumbent[1])
    for preference in _PREFERENCES:
        tree.offer(_dispatch(problem, preference))
    tree.offer(_beam(problem, effort.beam_width))
    tree.grow(effort.max_states, started_s + effort.time_limit_s)
    if tree.best is not None:
        orders = problem.orders_of(tree.best)
    elif incumbent is not None:
        orders = incumbent[0]
    else:
        raise ConfigError(
            f"memory limit of {problem.memory_limit_bytes:.6g} bytes a device: no order"
            f" {'exists' if tree.finished else 'was found'}; the most that a device holds at rest"
            f" is {max(problem.fixed_bytes):.6g} bytes, raise the limit or recompute more"
        )
    return SearchResult(
        orders=orders,
        makespan_s=tree.best_s,
        lower_bound_s=tree.lower_bound_s,
        optimal=tree.lower_bound_s == tree.best_s,
        states=tree.states,
    )


def _dispatch(problem: Problem, preference: Sequence[type[ComputeInstruction]]) -> State | None:
    """Returns the state in which no device ever stood still, preferred classes first; ``None`` in
    a dead end.
    """
    state = problem.start
    while not problem.is_complete(state):
        ready = [
            (start_s, preference.index(type(problem.jobs[number].instruction)), number)
            for start_s, number in problem.ready(state)
        ]
        if not ready:
            return None
        start_s, _, number = min(ready)
        state = problem.run(state, number, start_s)
    return state


def _beam(problem: Problem, width: int) -> State | None:
    """Returns the best completion of a beam with ``width`` states of each number of jobs.

    States are ranked by their bound (the quick one if there are many jobs). Ties are broken by the
    backwards that have run, the idle time of devices, and the waits that they cause.
    """
    bound_s = problem.bound_s if len(problem.jobs) <= _FEW_JOBS else problem.quick_bound_s
    beam = [problem.start]
    for _ in problem.jobs:
        states_by_position: dict[tuple[int, ...], tuple[_Rank, State]] = {}
        for state in itertools.chain.from_iterable(_after_one(problem, s) for s in beam):
            backwards, idle_s = _progress(problem, state)
            rank = (bound_s(state), -backwards, idle_s, len(state.waiting))
            if state.counts not in states_by_position or rank < states_by_position[state.counts][0]:
                states_by_position[state.counts] = (rank, state)
        ranked = heapq.nsmallest(width, states_by_position.values(), key=lambda entry: entry[0])
        beam = [state for _, state in ranked]
    return min(beam, key=lambda state: state.makespan_s, default=None)


def _progress(problem: Problem, state: State) -> tuple[int, float]:
    """Returns how many backwards have run, and seconds that devices stood still till now."""
    backwards, busy_s = 0, 0.0
    for lane, count in zip(problem.lanes, state.counts, strict=True):
        job = problem.jobs[lane[0]]
        busy_s += count * job.seconds
        if isinstance(job.instruction, Backward | BackwardInput):
            backwards += count
    return backwards, added(state.clocks) - busy_s


def _after_one(problem: Problem, state: State) -> Iterator[State]:
    """Yields states in which one more job has run, with lanes made to wait in between."""
    for following in problem.successors(state):
        if following.counts != state.counts:
            yield following
        else:
            yield from _after_one(problem, following)


@dataclass(slots=True)
class _Tree:
    """Branches and bounds, best bound first, deepest first among equals."""

    problem: Problem
    best_s: float
    best: State | None = None
    states: int = 0
    finished: bool = False
    _heap: list[tuple[float, int, int, State]] = field(default_factory=list)
    _seen: dict[object, list[tuple[float, ...]]] = field(default_factory=dict)

    def offer(self, state: State | None) -> None:
        """Takes a complete state if it is better than the best so far."""
        if state is not None and state.makespan_s < self.best_s * (1.0 - _TOLERANCE):
            self.best, self.best_s = state, state.makespan_s

    @property
    def lower_bound_s(self) -> float:
        """The least bound that is still open, or the best if nothing is."""
        return min(self._heap[0][0], self.best_s) if self._heap else self.best_s

    def grow(self, max_states: int, deadline_s: float) -> None:
        """Visits states until nothing better can be left, or a limit is reached."""
        ties = itertools.count()
        start = self.problem.start
        self._heap = [(self.problem.bound_s(start), 0, next(ties), start)]
        while self._heap and self._is_better(self._heap[0][0]):
            if self.states >= max_states or time.monotonic() > deadline_s:
                return
            bound_s, _, _, state = heapq.heappop(self._heap)
            self.states += 1
            for following in self.problem.successors(state):
                if self.problem.is_complete(following):
                    self.offer(following)
                elif not self._is_dominated(following):
                    # A bound that got weaker by rounding must not hide the stronger one before.
                    bound = max(bound_s, self.problem.bound_s(following))
                    if self._is_better(bound):
                        depth = sum(following.counts)
                        heapq.heappush(self._heap, (bound, -depth, next(ties), following))
        self._heap.clear()
        self.finished = True

    def _is_better(self, bound_s: float) -> bool:
        return bound_s < self.best_s * (1.0 - _TOLERANCE)

    def _is_dominated(self, state: State) -> bool:
        """Returns whether a state that is equally far is nowhere later; else remembers this one."""
        times = self.problem.times_of(state)
        seen = self._seen.setdefault((state.counts, state.waiting), [])
        if any(all(map(float.__le__, other, times)) for other in seen):
            return True
        seen[:] = [other for other in seen if not all(map(float.__le__, times, other))]
        seen.append(times)
        return False
