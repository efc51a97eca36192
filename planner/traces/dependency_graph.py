"""Dependencies of a measured attempt: work as nodes, each of which knows the work before it.

The dependencies are those of the plan (:mod:`penstock.protocol.plan.semantics`). The measured times
tell which of them held something up. :mod:`penstock.planner.traces.critical_path` walks along them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from penstock.planner.schedule.tensors import Tensor, TensorKind, taken_by, transferred
from penstock.planner.traces.measured import MeasuredAttempt
from penstock.planner.traces.traced import SENDS, DeviceTrace, Moved, TracedInstruction
from penstock.protocol.plan.instructions import (
    FetchWeights,
    Instruction,
    OffloadGradients,
    Phase,
    Recompute,
    RecomputeAfter,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.semantics import row_of
from penstock.protocol.run.trace import TraceEvent, TraceLane

LATE_S = 0.01
"""A sweep that begins so long after its block's gradients were there waited for something else."""
_SETTLING = ("settle", "finish", "cast")


class Resource(StrEnum):
    """Resources on which a second of a step is spent."""

    COMPUTE = "compute"
    """A device computes."""
    H2D = "h2d"
    """Copies from host memory to a device: weights, and activations that come back."""
    D2H = "d2h"
    """Copies from a device to host memory: gradients, and activations that go."""
    PEER_LINKS = "peer_links"
    """Tensors between devices of one node."""
    NETWORK = "network"
    """Anything between nodes: tensors, weights and gradients."""
    OPTIMIZER = "optimizer"
    """Sweeps of the optimizer, and updates on devices."""
    DATA = "data"
    """The batch is read."""
    SCHEDULER = "scheduler"
    """Announcements, reports, decision and journal."""
    OVERHEAD = "overhead"
    """Time between pieces of work: interpreters, wake-ups, hand-overs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Work that took from ``start_s`` to ``end_s`` on a resource. ``before`` yields the work that
    could have held it up. ``gap``: the resource of the time between it and the last of these.
    """

    resource: Resource
    place: str
    label: str
    start_s: float
    end_s: float
    before: Callable[[], Iterator[Work]]
    gap: Resource = Resource.OVERHEAD


def _nothing() -> Iterator[Work]:
    return iter(())


@dataclass(slots=True)
class _Device:
    """The work of one device, in the order of its program; ``at``: places of instructions in the
    program, by identity.
    """

    number: int
    trace: DeviceTrace
    works: list[TracedInstruction]
    at: dict[int, int]
    fetches: dict[tuple[Phase, int], list[TracedInstruction]]
    copies: list[TracedInstruction]
    offloads: list[tuple[float, int]]

    @classmethod
    def of(cls, number: int, trace: DeviceTrace) -> _Device:
        computed, issued = iter(trace.computed), iter(trace.issued)
        following = {True: next(computed, None), False: next(issued, None)}
        works: list[TracedInstruction] = []
        for instruction in trace.program:
            for computes, rest in ((True, computed), (False, issued)):
                work = following[computes]
                if work is not None and work.instruction is instruction:
                    works.append(work)
                    following[computes] = next(rest, None)
                    break
        fetches = defaultdict(list)
        for load in sorted((*trace.fetches, *trace.loads), key=lambda w: w.event.end_s):
            if isinstance(load.instruction, FetchWeights):
                fetches[load.instruction.phase, load.instruction.stage].append(load)
        return cls(
            number=number,
            trace=trace,
            works=works,
            at={id(work): index for index, work in enumerate(works)},
            fetches=dict(fetches),
            copies=sorted(trace.copies, key=lambda work: work.event.end_s),
            offloads=sorted((moment, block) for (block, _), moment in trace.published.items()),
        )

    def issue_of(self, event: TraceEvent) -> int:
        """Returns the place of the instruction that started a fetch outside the interpreter."""
        places = (
            place
            for place, work in enumerate(self.works)
            if work.event.text == event.text and work.event.start_s <= event.start_s
        )
        return max(places, default=0)


class Causes:
    """The work of one attempt. ``copied_s``: seconds that a fetch's copy takes, by phase and stage;
    what a fetch from another node takes longer is the network's.
    """

    def __init__(
        self,
        attempt: MeasuredAttempt,
        devices_per_node: int,
        copied_s: Callable[[FetchWeights], float],
    ) -> None:
        self._attempt = attempt
        self._per_node = devices_per_node
        self._copied_s = copied_s
        self._devices = {d: _Device.of(d, t) for d, t in attempt.trace.devices.items()}
        self._moved = {(m.tensor, m.target): m for m in attempt.trace.moved}
        self._earlier: dict[tuple[Tensor, int], Moved] = {}
        last: dict[tuple[int, int], Moved] = {}
        for moved in attempt.trace.moved:
            way = moved.source, moved.target
            if way in last:
                self._earlier[moved.tensor, moved.target] = last[way]
            last[way] = moved
        self._sends = {
            (transferred(work.instruction), work.instruction.peer): index
            for device in self._devices.values()
            for index, work in enumerate(device.works)
            if isinstance(work.instruction, SENDS)
        }

    def end(self) -> Work:
        """Returns the end of the step: all decisions are made and announced."""
        attempt = self._attempt
        end_s = attempt.ended_s
        if attempt.step_s is not None:
            end_s = attempt.announced_s + attempt.step_s
        decided = self._moment(attempt.decided_s, "decision", self._before_decision)
        return self._scheduled(attempt.decided_s, end_s, "decision", lambda: iter((decided,)))

    # ---- the scheduler ----

    def _scheduled(
        self, start_s: float, end_s: float, label: str, before: Callable[[], Iterator[Work]]
    ) -> Work:
        return Work(
            resource=Resource.SCHEDULER,
            place="scheduler",
            label=label,
            start_s=start_s,
            end_s=end_s,
            before=before,
            gap=Resource.SCHEDULER,
        )

    def _moment(self, at_s: float, label: str, before: Callable[[], Iterator[Work]]) -> Work:
        return self._scheduled(at_s, at_s, label, before)

    def _before_decision(self) -> Iterator[Work]:
        attempt = self._attempt
        judged = self._moment(attempt.judged_s, "reports", self._before_judgement)
        yield judged
        for node, sweeps in attempt.amends.items():
            for index in range(len(sweeps)):
                yield self._amend(node, index, judged)

    def _amend(self, node: int, index: int, judged: Work) -> Work:
        event = self._attempt.amends[node][index]

        def before() -> Iterator[Work]:
            yield self._amend(node, index - 1, judged) if index else judged

        return self._sweep_work(node, event, before)

    def _before_judgement(self) -> Iterator[Work]:
        for device in self._devices.values():
            if device.works:
                yield self._instruction(device, len(device.works) - 1)
            for index in range(len(device.trace.updates)):
                yield self._update(device, index)
        for node, sweeps in self._attempt.sweeps.items():
            if sweeps:
                yield self._sweep(node, len(sweeps) - 1)

    # ---- optimizers ----

    def _sweep_work(
        self, node: int, event: TraceEvent, before: Callable[[], Iterator[Work]]
    ) -> Work:
        return Work(
            resource=Resource.OPTIMIZER,
            place=f"optimizer {node}",
            label=event.text,
            start_s=event.start_s,
            end_s=event.end_s,
            before=before,
        )

    def _sweep(self, node: int, index: int) -> Work:
        event = self._attempt.sweeps[node][index]

        def before() -> Iterator[Work]:
            if index:
                yield self._sweep(node, index - 1)
            name, _, block = event.text.partition(" ")
            if name not in _SETTLING:
                partials = list(self._gradients(node, int(block), event.start_s))
                yield from partials
                if all(work.end_s < event.start_s - LATE_S for work in partials):
                    yield from self._last_gradients(node, event.start_s)

        return self._sweep_work(node, event, before)

    def _gradients(self, node: int, block: int, until_s: float) -> Iterator[Work]:
        """Yields the last publication of a block's gradients, or their arrival from elsewhere."""
        pulls = self._attempt.pulls.get(node, ())
        for index, pull in enumerate(pulls):
            if pull.text.split()[0] == str(block) and pull.end_s <= until_s:
                yield self._pull(node, index)
        for device in self._devices.values():
            if self._node_of(device.number) == node:
                for (published, _), moment in device.trace.published.items():
                    if published == block and moment <= until_s:
                        yield self._publication(device, moment, block)

    def _last_gradients(self, node: int, until_s: float) -> Iterator[Work]:
        """Yields the last work on each device of a node. An optimizer that begins long after the
        gradients of its first block waited for all devices.
        """
        for device in self._devices.values():
            place = bisect_right(device.offloads, (until_s, inf)) - 1
            if self._node_of(device.number) == node and place >= 0:
                yield self._publication(device, *device.offloads[place])

    def _pull(self, node: int, index: int) -> Work:
        pulls = self._attempt.pulls[node]
        event = pulls[index]
        block, contribution = map(int, event.text.split())
        sources = [
            (moment, device)
            for device in self._devices.values()
            if (moment := device.trace.published.get((block, contribution))) is not None
        ]
        published_s = max((s for s, _ in sources), default=event.end_s)
        start_s = max(published_s, pulls[index - 1].end_s if index else 0.0)

        def before() -> Iterator[Work]:
            if index:
                yield self._pull(node, index - 1)
            for moment, device in sources:
                yield self._publication(device, moment, block)

        return Work(
            resource=Resource.NETWORK,
            place=f"optimizer {node}",
            label=f"pull {event.text}",
            start_s=min(start_s, event.end_s),
            end_s=event.end_s,
            before=before,
        )

    def _publication(self, device: _Device, moment: float, block: int) -> Work:
        """Returns the copy of a block's gradients to the host, from their OFFLOAD_GRADIENTS or from
        the copy before on.
        """
        stages = self._attempt.plan.backward_stages
        moments = [
            (index, work)
            for index, work in enumerate(device.works)
            if isinstance(work.instruction, OffloadGradients)
            and block in stages[work.instruction.stage].blocks
            and work.event.start_s <= moment
        ]
        index, work = moments[-1] if moments else (0, device.works[0])
        place = bisect_right(device.offloads, (moment, -1)) - 1
        free_s = device.offloads[place][0] if place >= 0 else 0.0
        start_s = max(work.ready_s, min(free_s, moment))

        def before() -> Iterator[Work]:
            if place >= 0 and free_s > work.ready_s:
                yield self._publication(device, *device.offloads[place])
            yield from self._issued(device, index)

        return Work(
            resource=Resource.D2H,
            place=f"device {device.number}",
            label=f"OG of block {block}",
            start_s=min(start_s, moment),
            end_s=moment,
            before=before,
        )

    def _update(self, device: _Device, index: int) -> Work:
        work = device.trace.updates[index]
        block = work.instruction.block  # type: ignore[attr-defined]  # an UPDATE

        def before() -> Iterator[Work]:
            if index:
                yield self._update(device, index - 1)
            for (published, _), moment in device.trace.published.items():
                if published == block and moment <= work.event.end_s:
                    yield self._publication(device, moment, block)
            for node, sweeps in self._attempt.sweeps.items():
                for at, event in enumerate(sweeps):
                    if event.text.split()[1] == str(block) and event.end_s <= work.event.end_s:
                        yield self._sweep(node, at)

        return Work(
            resource=Resource.OPTIMIZER,
            place=f"device {device.number}",
            label=str(work.instruction),
            start_s=work.ready_s,
            end_s=work.event.end_s,
            before=before,
        )

    # ---- devices ----

    def _node_of(self, device: int) -> int:
        return device // self._per_node

    def _issued(self, device: _Device, index: int) -> Iterator[Work]:
        """Yields what the interpreter did before an instruction."""
        yield self._instruction(device, index - 1) if index > 0 else self._batch(device)

    def _batch(self, device: _Device) -> Work:
        event, announced_s = device.trace.batch, self._attempt.announced_s
        if event is None:
            return self._moment(announced_s, "announcement", _nothing)
        return Work(
            resource=Resource.DATA,
            place=f"device {device.number}",
            label="batch",
            start_s=event.start_s,
            end_s=event.end_s,
            before=lambda: iter((self._moment(announced_s, "announcement", _nothing),)),
            gap=Resource.SCHEDULER,
        )

    def _instruction(self, device: _Device, index: int) -> Work:
        work = device.works[index]
        computes = row_of(work.instruction).lane == "compute"

        def before() -> Iterator[Work]:
            if work.event.waited_s > 0.0:
                yield from self._inputs(device, index)
            yield from self._issued(device, index)

        return Work(
            resource=Resource.COMPUTE if computes else Resource.OVERHEAD,
            place=f"device {device.number}",
            label=work.event.text.split(" keep=")[0],
            start_s=work.ready_s,
            end_s=work.event.end_s,
            before=before,
        )

    def _inputs(self, device: _Device, index: int) -> Iterator[Work]:
        """Yields what an instruction can have waited for."""
        work = device.works[index]
        until_s = work.ready_s + 1e-4  # a moment is noticed a little after it was there
        for tensor in _tensors(work.instruction):
            moved = self._moved.get((tensor, device.number))
            if moved is not None and device.trace.arrivals[tensor] <= until_s:
                yield self._arrival(moved)
        for fetch in _buffers(device, work.instruction):
            if fetch.event.end_s <= until_s:
                yield self._fetch(device, fetch, index)
        for place, copy in enumerate(device.copies):
            if isinstance(copy.instruction, SwapIn | SwapOut) and copy.event.end_s <= until_s:
                yield self._copy(device, place)
        place = bisect_right(device.offloads, (until_s, -1)) - 1
        if place >= 0:
            yield self._publication(device, *device.offloads[place])

    def _fetch(self, device: _Device, fetch: TracedInstruction, index: int) -> Work:
        """Returns the fetch of a stage's weights: over the network from other nodes, then to the
        device. The fetch runs outside the interpreter, or within the instruction at ``index``.
        """
        event = fetch.event
        assert isinstance(fetch.instruction, FetchWeights)
        copied_s = min(event.end_s - event.start_s, self._copied_s(fetch.instruction))
        where, label = f"device {device.number}", str(fetch.instruction)

        def before() -> Iterator[Work]:
            issued = index
            if event.lane is TraceLane.FETCH:
                earlier = [w for w in device.trace.fetches if w.event.end_s <= event.start_s + 1e-6]
                if earlier:
                    yield self._fetch(device, max(earlier, key=lambda w: w.event.end_s), index)
                issued = device.issue_of(event)
            yield from self._issued(device, issued)
            for node, sweeps in self._attempt.sweeps.items():
                for at, sweep in enumerate(sweeps):
                    if sweep.text.startswith(("finish", "cast")) and sweep.end_s <= event.start_s:
                        yield self._sweep(node, at)

        read = Work(
            resource=Resource.NETWORK,
            place=where,
            label=f"read for {label}",
            start_s=event.start_s,
            end_s=event.end_s - copied_s,
            before=before,
        )
        return Work(
            resource=Resource.H2D,
            place=where,
            label=label,
            start_s=event.end_s - copied_s,
            end_s=event.end_s,
            before=lambda: iter((read,)),
        )

    def _copy(self, device: _Device, place: int) -> Work:
        """Returns a swap: in the order of its stream, when its instruction was issued."""
        copy = device.copies[place]
        swap = copy.instruction
        assert isinstance(swap, SwapIn | SwapOut)
        index = max(
            (i for i, w in enumerate(device.works) if w.instruction == swap),
            default=0,
        )

        def before() -> Iterator[Work]:
            if place:
                earlier = device.copies[place - 1]
                if isinstance(earlier.instruction, SwapIn | SwapOut):
                    yield self._copy(device, place - 1)
                else:
                    yield from self._issued(device, index)
            yield from self._issued(device, index)

        resource = Resource.H2D if isinstance(swap, SwapIn) else Resource.D2H
        return Work(
            resource=resource if swap.peer is None else Resource.PEER_LINKS,
            place=f"device {device.number}",
            label=str(swap),
            start_s=copy.ready_s,
            end_s=copy.event.end_s,
            before=before,
        )

    def _arrival(self, moved: Moved) -> Work:
        """Returns a tensor on its way, from its send or from the arrival of the tensor before it
        on.
        """
        source = self._devices[moved.source]
        same_node = self._node_of(moved.source) == self._node_of(moved.target)
        tensor, target = moved.tensor, moved.target
        # On an emulated clock it may have been there before Python got round to sending it.
        arrived_s = self._devices[target].trace.arrivals[tensor]

        def before() -> Iterator[Work]:
            earlier = self._earlier.get((tensor, target))
            if earlier is not None:
                yield self._arrival(earlier)
            yield from self._issued(source, self._sends[tensor, target])

        return Work(
            resource=Resource.PEER_LINKS if same_node else Resource.NETWORK,
            place=f"device {moved.source} to {moved.target}",
            label=f"{tensor.kind} {tensor.stage} {tensor.micro_batch}",
            start_s=min(moved.start_s, arrived_s),
            end_s=arrived_s,
            before=before,
        )


def _tensors(instruction: Instruction) -> Iterator[Tensor]:
    taken = taken_by(instruction)
    if taken is not None:
        yield taken
    if isinstance(instruction, Recompute) and instruction.after is RecomputeAfter.GRADIENT:
        yield Tensor(
            kind=TensorKind.GRADIENT,
            stage=instruction.stage + 1,
            micro_batch=instruction.micro_batch,
        )


def _buffers(device: _Device, instruction: Instruction) -> Iterator[TracedInstruction]:
    """Yields the fetches of an instruction's weights: a backward may use the forward's."""
    stage = getattr(instruction, "stage", None)
    if stage is None or row_of(instruction).weights is None:
        return
    side = row_of(instruction).side
    for phase in {side or Phase.FORWARD, Phase.FORWARD}:
        yield from device.fetches.get((phase, stage), ())
