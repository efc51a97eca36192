"""A time that no order of a schedule's instructions on their devices can beat.

The bound counts compute only: transfers, copies, memory limits and the optimizer can only add to
it.

Fixed are the device of each instruction, its seconds, and its needs. Free is the order on each
device. Every instruction i has a **head** r(i), a **body** p(i), and a **tail** q(i). The head is
the longest chain of instructions that must end before i starts, the tail the longest chain that can
only start after i.

Proof that :func:`lower_bound_s` holds. Take any order that respects the needs, and one device. On
it instruction i starts no earlier than r(i), because its chain needs that time on any device. The
device works on one instruction at a time. The end of everything is no earlier than C(i) + q(i),
where C(i) is the end of i. So the makespan is at least the optimum of the one-machine problem
"minimise the largest C(i) + q(i) with release times r(i)".

Letting the machine interrupt instructions can only lower that optimum. With interruptions the rule
"always run the released instruction with the longest tail" attains it (Jackson's preemptive
schedule; Carlier, "The one-machine sequencing problem", 1982). The rule is computed here. Its
result equals the maximum of min r + sum p + min q over all sets S of instructions of the device.
That is needed compute plus an unavoidable ramp before and after. The bound is the largest over all
devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from penstock.planner.cost.costs import Costs
from penstock.planner.schedule.layout import ComputeInstruction, Order, StageLayout
from penstock.planner.schedule.timing import seconds_of
from penstock.protocol.plan.resources import PlanFacts
from penstock.protocol.plan.semantics import makes, reads

OneMachineJob = tuple[float, float, float]
"""Head, body and tail of an instruction, in seconds."""


def lower_bound_s(layout: StageLayout, orders: Sequence[Order], costs: Costs) -> float:
    """Returns seconds that no order of the compute instructions of ``orders`` can beat."""
    work = [
        (device, instruction)
        for device, order in enumerate(orders)
        for instruction in order
        if isinstance(instruction, ComputeInstruction)
    ]
    seconds = seconds_of(PlanFacts.of(layout, orders), costs)
    bodies = [seconds(instruction) for _, instruction in work]
    needs = dependencies(layout, [instruction for _, instruction in work])
    sequence = needs_first(needs)
    heads, tails = [0.0] * len(work), [0.0] * len(work)
    for index in sequence:
        heads[index] = max((heads[n] + bodies[n] for n in needs[index]), default=0.0)
    for index in reversed(sequence):
        for needed in needs[index]:
            tails[needed] = max(tails[needed], bodies[index] + tails[index])
    jobs: dict[int, list[OneMachineJob]] = defaultdict(list)
    for (device, _), job in zip(work, zip(heads, bodies, tails, strict=True), strict=True):
        jobs[device].append(job)
    return max(map(one_machine_s, jobs.values()), default=0.0)


def one_machine_s(jobs: Sequence[OneMachineJob]) -> float:
    """Returns the least possible largest (end + tail) of jobs on one machine that may interrupt
    them, in seconds (Carlier, 1982, as above).
    """
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []
    now_s = latest_s = 0.0
    while waiting or ready:
        if not ready:
            now_s = max(now_s, waiting[-1][0])
        while waiting and waiting[-1][0] <= now_s:
            _, body_s, tail_s = waiting.pop()
            heappush(ready, (-tail_s, body_s))
        negated_tail_s, left_s = heappop(ready)
        if waiting and waiting[-1][0] < now_s + left_s:
            heappush(ready, (negated_tail_s, left_s - (waiting[-1][0] - now_s)))
            now_s = waiting[-1][0]
        else:
            now_s += left_s
            latest_s = max(latest_s, now_s - negated_tail_s)
    return latest_s


def dependencies(layout: StageLayout, work: Sequence[ComputeInstruction]) -> list[list[int]]:
    """Returns for each instruction the numbers of the instructions with results that it uses."""
    facts = PlanFacts.of(layout, [work])
    made = {resource: index for index, i in enumerate(work) for resource in makes(i, facts)}
    return [[made[needed] for needed in reads(i, facts) if needed in made] for i in work]


def needs_first(needs: Sequence[Sequence[int]]) -> list[int]:
    """Returns numbers in an order in which everything comes after what it needs.

    Raises:
        ValueError: some need each other in a circle. What :func:`dependencies` says never does.
    """
    users: list[list[int]] = [[] for _ in needs]
    for index, needed in enumerate(needs):
        for other in needed:
            users[other].append(index)
    missing = [len(needed) for needed in needs]
    sequence = [index for index, count in enumerate(missing) if count == 0]
    for index in sequence:
        for user in users[index]:
            missing[user] -= 1
            if missing[user] == 0:
                sequence.append(user)
    if len(sequence) < len(needs):
        raise ValueError("compute instructions need each other in a circle")
    return sequence
