"""Ordering of compute instructions as a problem: jobs on machines, and its partial solutions.

A **job** is an instruction with its device, seconds, needs, and the bytes it takes and leaves. Jobs
that differ only in their micro-batch form a **lane** and run in ascending order. The restriction
costs nothing if the micro-batches of a route are alike. In any solution, let the k-th run of a lane
be that of the k-th micro-batch. The k-th run starts after k runs of the lane it needs have ended.
So all needs are still met, at the same times and with the same bytes held. If a schedule treats
micro-batches differently (recomputes some), all schemes keep this restriction anyway.

A **state** is the position of each lane and the moments at which devices and results are ready. The
rest of a solution depends on nothing else. So of two states at equal positions one can be dropped
if the other is nowhere later (dominance).

:func:`Problem.successors` gives a set of next states of which one leads to an optimum (Giffler and
Thompson, "Algorithms for solving production-scheduling problems", 1960). Of all jobs that can run
next, take the one that would end first. The next job of its device starts before that end, since
otherwise the first job would fit in before it. A memory limit breaks this argument if the job adds
to the bytes held, because a later job may no longer fit. Hence one more successor, in which this
lane waits until its device has run something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from penstock.planner.cost.costs import Costs
from penstock.planner.schedule.bounds import dependencies, needs_first, one_machine_s
from penstock.planner.schedule.layout import ComputeInstruction, Order, Residency, StageLayout
from penstock.planner.schedule.memory_order import OrderMemory
from penstock.planner.schedule.timing import seconds_of
from penstock.protocol.plan.instructions import BackwardWeight
from penstock.protocol.plan.resources import PlanFacts

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopJob:
    """A job of the job-shop problem.

    ``needs``: numbers of jobs. ``takes_bytes``: at most held more while it runs than before;
    ``leaves_bytes``: afterwards. ``tail_s``: the longest chain of jobs that only it lets start.
    """

    instruction: ComputeInstruction
    device: int
    lane: int
    seconds: float
    needs: tuple[int, ...]
    takes_bytes: float = 0.0
    leaves_bytes: float = 0.0
    tail_s: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """``counts[l]`` jobs of lane l have run; ``ends[l]`` are the times at which they ended.

    ``clocks[d]`` and ``held_bytes[d]`` of device d; ``waiting``: lanes that may not run next.
    ``before`` and ``job``: how it came about.
    """

    counts: tuple[int, ...]
    clocks: tuple[float, ...]
    ends: tuple[tuple[float, ...], ...]
    held_bytes: tuple[float, ...]
    waiting: frozenset[int] = frozenset()
    before: State | None = None
    job: int = -1

    @property
    def makespan_s(self) -> float:
        """The end of the last job so far, in seconds."""
        return max(self.clocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Jobs in lanes; ``lanes[l]`` are the numbers of its jobs in order, ``places[j]`` is where job
    j is in its lane, ``users[j]`` are the jobs that need it. ``hop_s`` passes between devices.

    ``sequence``: all jobs, each after those it needs; ``ancestors[j]``: all those that must have
    run before j, as bits.
    """

    jobs: tuple[ShopJob, ...]
    lanes: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    num_devices: int
    fixed_bytes: tuple[float, ...]
    sequence: tuple[int, ...]
    ancestors: tuple[int, ...]
    memory_limit_bytes: float = inf
    hop_s: float = 0.0

    @classmethod
    def of(
        cls,
        layout: StageLayout,
        orders: Sequence[Order],
        costs: Costs,
        *,
        residency: Residency = Residency.RESIDENT,
        memory_limit_bytes: float | None = None,
        hop_s: float = 0.0,
    ) -> Problem:
        """Returns the problem of the instructions of ``orders`` on their devices, in any order.

        Several micro-batches of one BACKWARD_WEIGHT become jobs of their own.

        Raises:
            ValueError: instructions need each other in a circle.
        """
        jobs = _jobs(layout, orders, costs)
        lanes: list[list[int]] = [
            [] for _ in range(1 + max((job.lane for job in jobs), default=-1))
        ]
        places = []
        for number, job in enumerate(jobs):
            places.append(len(lanes[job.lane]))
            lanes[job.lane].append(number)
        chained = [
            [*job.needs, *lanes[job.lane][max(0, place - 1) : place]]
            for job, place in zip(jobs, places, strict=True)
        ]
        sequence = tuple(needs_first(chained))
        jobs = _with_tails(jobs, chained, sequence, hop_s)
        jobs, fixed_bytes = _with_bytes(jobs, sequence, layout, costs, residency)
        users: list[list[int]] = [[] for _ in jobs]
        for number, job in enumerate(jobs):
            for needed in job.needs:
                users[needed].append(number)
        return cls(
            jobs=tuple(jobs),
            lanes=tuple(map(tuple, lanes)),
            places=tuple(places),
            users=tuple(map(tuple, users)),
            num_devices=layout.num_devices,
            fixed_bytes=fixed_bytes,
            sequence=sequence,
            ancestors=_ancestors(chained, sequence),
            memory_limit_bytes=inf if memory_limit_bytes is None else memory_limit_bytes,
            hop_s=hop_s,
        )

    @property
    def start(self) -> State:
        """The state in which nothing has run."""
        return State(
            counts=(0,) * len(self.lanes),
            clocks=(0.0,) * self.num_devices,
            ends=((),) * len(self.lanes),
            held_bytes=self.fixed_bytes,
        )

    def is_complete(self, state: State) -> bool:
        """Returns whether everything has run."""
        return sum(state.counts) == len(self.jobs)

    def successors(self, state: State) -> list[State]:
        """Returns next states of which one leads to the best solution; none in a dead end."""
        ready = list(self.ready(state))
        if not ready:
            return []
        first_end_s, _, first = min(
            (start_s + self.jobs[job].seconds, start_s, job) for start_s, job in ready
        )
        device = self.jobs[first].device
        next_states = [
            self.run(state, job, start_s)
            for start_s, job in ready
            if self.jobs[job].device == device and (start_s < first_end_s or job == first)
        ]
        if self.jobs[first].leaves_bytes > 0.0 and self.memory_limit_bytes < inf:
            waiting = state.waiting | {self.jobs[first].lane}
            if self._has_way_out(state.counts, waiting, device):
                next_states.append(replace(state, waiting=waiting))
        return next_states

    def _has_way_out(self, counts: tuple[int, ...], waiting: frozenset[int], device: int) -> bool:
        """Returns whether the device has a job that needs none of those that wait for it."""
        following = {
            lane: self.lanes[lane][count]
            for lane, count in enumerate(counts)
            if count < len(self.lanes[lane]) and self.jobs[self.lanes[lane][0]].device == device
        }
        stopped = sum(1 << number for lane, number in following.items() if lane in waiting)
        return any(
            not self.ancestors[number] & stopped
            for lane, number in following.items()
            if lane not in waiting
        )

    def ready(self, state: State) -> Iterator[tuple[float, int]]:
        """Yields jobs that can run next, with their earliest starts in seconds."""
        for lane, count in enumerate(state.counts):
            if count == len(self.lanes[lane]) or lane in state.waiting:
                continue
            number = self.lanes[lane][count]
            job = self.jobs[number]
            if state.held_bytes[job.device] + job.takes_bytes > self.memory_limit_bytes:
                continue
            start_s = state.clocks[job.device]
            for needed in job.needs:
                other = self.jobs[needed]
                place = self.places[needed]
                if place >= state.counts[other.lane]:
                    break
                start_s = max(start_s, state.ends[other.lane][place] + self._hop(other, job))
            else:
                yield start_s, number

    def run(self, state: State, number: int, start_s: float) -> State:
        """Returns the state after a job that is ready."""
        job = self.jobs[number]
        lane, device, end_s = job.lane, job.device, start_s + job.seconds
        on_device = frozenset(
            other for other in state.waiting if self.jobs[self.lanes[other][0]].device == device
        )
        return State(
            counts=_with(state.counts, lane, state.counts[lane] + 1),
            clocks=_with(state.clocks, device, end_s),
            ends=_with(state.ends, lane, (*state.ends[lane], end_s)),
            held_bytes=_with(state.held_bytes, device, state.held_bytes[device] + job.leaves_bytes),
            waiting=state.waiting - on_device,
            before=state,
            job=number,
        )

    def bound_s(self, state: State) -> float:
        """Returns seconds before which no completion of a state ends: heads along needs, then one
        machine at a time.
        """
        heads: dict[int, float] = {}
        waiting: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        for number in self.sequence:
            job = self.jobs[number]
            place = self.places[number]
            if place < state.counts[job.lane]:
                continue
            head_s = state.clocks[job.device]
            for needed in job.needs:
                other = self.jobs[needed]
                end_s = heads.get(needed)
                if end_s is None:
                    end_s = state.ends[other.lane][self.places[needed]]
                head_s = max(head_s, end_s + self._hop(other, job))
            if place > state.counts[job.lane]:
                head_s = max(head_s, heads[self.lanes[job.lane][place - 1]])
            heads[number] = head_s + job.seconds
            waiting[job.device].append((head_s, job.seconds, job.tail_s))
        return max((state.makespan_s, *map(one_machine_s, waiting.values())))

    def quick_bound_s(self, state: State) -> float:
        """Returns a weaker bound in time proportional to the lanes: what a device has left, and the
        tail after it.
        """
        left = [0.0] * self.num_devices
        tails = [inf] * self.num_devices
        for lane, count in enumerate(state.counts):
            numbers = self.lanes[lane]
            if count < len(numbers):
                last = self.jobs[numbers[-1]]
                left[last.device] += (len(numbers) - count) * last.seconds
                tails[last.device] = min(tails[last.device], last.tail_s)
        ends = (
            clock + rest + tail
            for clock, rest, tail in zip(state.clocks, left, tails, strict=True)
            if rest
        )
        return max((state.makespan_s, *ends))

    def times_of(self, state: State) -> tuple[float, ...]:
        """Returns what makes a state later than one that is equally far: clocks, pending results.

        A result that is ready before any device that uses it is as good as ready then.
        """
        times = list(state.clocks)
        for lane, ends in enumerate(state.ends):
            for number, end_s in zip(self.lanes[lane], ends, strict=False):
                soonest_s = min(
                    map(state.clocks.__getitem__, self._pending(state, number)), default=inf
                )
                if soonest_s < inf:
                    times.append(max(end_s, soonest_s))
        return tuple(times)

    def _pending(self, state: State, number: int) -> Iterator[int]:
        """Yields the devices that still need the result of a job."""
        for user in self.users[number]:
            job = self.jobs[user]
            if self.places[user] >= state.counts[job.lane]:
                yield job.device

    def orders_of(self, state: State) -> tuple[Order, ...]:
        """Returns what each device runs, from the history of a state."""
        orders: list[list[ComputeInstruction]] = [[] for _ in range(self.num_devices)]
        while state.before is not None:
            if state.job >= 0:
                job = self.jobs[state.job]
                orders[job.device].append(job.instruction)
            state = state.before
        return tuple(tuple(reversed(order)) for order in orders)

    def _hop(self, made: ShopJob, used: ShopJob) -> float:
        return self.hop_s if made.device != used.device else 0.0


def _with(values: tuple[_T, ...], place: int, value: _T) -> tuple[_T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _jobs(layout: StageLayout, orders: Sequence[Order], costs: Costs) -> list[ShopJob]:
    """Returns jobs by micro-batch; instructions of one class and stage share a lane."""
    seconds = seconds_of(PlanFacts.of(layout, orders), costs)
    work = [
        (device, part, seconds(instruction) / share)
        for device, order in enumerate(orders)
        for instruction in order
        if isinstance(instruction, ComputeInstruction)
        for part, share in _parts(instruction)
    ]
    work.sort(key=lambda entry: _micro_batch(entry[1]))
    lanes: dict[tuple[type[ComputeInstruction], int], int] = {}
    return [
        ShopJob(
            instruction=instruction,
            device=device,
            lane=lanes.setdefault((type(instruction), instruction.stage), len(lanes)),
            seconds=took_s,
            needs=tuple(needed),
        )
        for (device, instruction, took_s), needed in zip(
            work, dependencies(layout, [instruction for _, instruction, _ in work]), strict=True
        )
    ]


def _parts(instruction: ComputeInstruction) -> Iterator[tuple[ComputeInstruction, int]]:
    """Yields the instruction, or one for each of its micro-batches, and how many they are."""
    if not isinstance(instruction, BackwardWeight):
        yield instruction, 1
        return
    for micro_batch in instruction.micro_batches:
        part = BackwardWeight(stage=instruction.stage, micro_batches=(micro_batch,))
        yield part, len(instruction.micro_batches)


def _micro_batch(instruction: ComputeInstruction) -> int:
    if isinstance(instruction, BackwardWeight):
        return instruction.micro_batches[0]
    return instruction.micro_batch


def _ancestors(chained: Sequence[Sequence[int]], sequence: Sequence[int]) -> tuple[int, ...]:
    ancestors = [0] * len(chained)
    for number in sequence:
        for needed in chained[number]:
            ancestors[number] |= ancestors[needed] | 1 << needed
    return tuple(ancestors)


def _with_tails(
    jobs: Sequence[ShopJob], chained: Sequence[Sequence[int]], sequence: Sequence[int], hop_s: float
) -> list[ShopJob]:
    tails = [0.0] * len(jobs)
    for number in reversed(sequence):
        job = jobs[number]
        for needed in chained[number]:
            hop = hop_s if jobs[needed].device != job.device else 0.0
            tails[needed] = max(tails[needed], hop + job.seconds + tails[number])
    return [replace(job, tail_s=tail_s) for job, tail_s in zip(jobs, tails, strict=True)]


def _with_bytes(
    jobs: Sequence[ShopJob],
    sequence: Sequence[int],
    layout: StageLayout,
    costs: Costs,
    residency: Residency,
) -> tuple[list[ShopJob], tuple[float, ...]]:
    """Returns jobs with their bytes, and what devices hold before any.

    They follow from what the same stage and micro-batch did before, which the needs put in order.
    """
    memories = [
        OrderMemory.of(layout, residency, costs, device) for device in range(layout.num_devices)
    ]
    fixed_bytes = tuple(memory.total_bytes for memory in memories)
    copies = list(jobs)
    for number in sequence:
        job, memory = jobs[number], memories[jobs[number].device]
        before = memory.total_bytes
        takes_bytes = memory.needed_bytes(job.instruction) - before
        memory.apply(job.instruction)
        leaves_bytes = memory.total_bytes - before
        copies[number] = replace(job, takes_bytes=takes_bytes, leaves_bytes=leaves_bytes)
    return copies, fixed_bytes
