"""A traced run as Chrome-trace JSON, for Perfetto and chrome://tracing.

A process stands for each device, each node's optimizer and the scheduler; a thread for each lane.
Arrows lead

* from the announcement of an attempt to the first instruction of each device,
* from a send to the transfer of the tensor, and to the instruction that takes the tensor,
* from published gradients to the sweep over their block,
* from sweeps to the loads of weights in the next attempt.

Times are microseconds since the first event. The format is "Trace Event Format" with complete
(``X``), metadata (``M``) and flow (``s``, ``f``) events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import Any

from penstock.planner.schedule.tensors import Tensor, taken_by, transferred
from penstock.planner.traces.traced import (
    SENDS,
    AttemptTrace,
    DeviceTrace,
    TracedInstruction,
    TracedRun,
)
from penstock.protocol.plan.instructions import FetchWeights, Instruction, Opcode, Phase
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.trace import TraceEvent

Event = dict[str, Any]

_SETTLING = ("settle", "finish", "cast")
_OPTIMIZERS = 1000
_SCHEDULER = 2000


class _Thread(IntEnum):
    """Lanes of a device in the order on the screen. Links follow, by peer."""

    COMPUTE = 1
    ISSUE = 2
    FETCH = 3
    OFFLOAD = 4
    COPY_OUT = 5
    SWAP_OUT = 6
    SWAP_IN = 7
    LINK = 10


_NAMES = {
    _Thread.COMPUTE: "compute",
    _Thread.ISSUE: "other instructions",
    _Thread.FETCH: "fetch",
    _Thread.OFFLOAD: "published gradients",
    _Thread.COPY_OUT: "gradients to the host",
    _Thread.SWAP_OUT: "swaps out",
    _Thread.SWAP_IN: "swaps in",
}


_COPIES = MappingProxyType(
    {
        Opcode.OFFLOAD_GRADIENTS: _Thread.COPY_OUT,
        Opcode.SWAP_OUT: _Thread.SWAP_OUT,
        Opcode.SWAP_IN: _Thread.SWAP_IN,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Attempts from ``first`` to ``last``, with everything between."""

    first: int
    last: int

    def __contains__(self, attempt: object) -> bool:
        return isinstance(attempt, int) and self.first <= attempt <= self.last


def chrome_trace(
    run: TracedRun, node_names: tuple[str, ...], attempts: Range | None, plan: Plan
) -> str:
    """Returns the JSON of all attempts, or of a range. ``plan`` has the blocks that a stage
    loads.
    """
    maker = _ChromeTrace(run, attempts)
    events = [*maker.names(node_names), *maker.devices(), *maker.sweeps(), *maker.scheduled()]
    events += [*maker.announcements(), *maker.loads(plan)]
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": "penstock"}},
        separators=(",", ":"),
    )


class _ChromeTrace:
    def __init__(self, run: TracedRun, attempts: Range | None) -> None:
        self._run = run
        scheduled = [
            event
            for event in run.scheduled
            if attempts is None or (event.attempt in attempts and event.attempt > 0)
        ]
        self._scheduled = scheduled
        self._all = attempts is None
        firsts = [*scheduled, *(_firsts(run) if self._all else ())]
        self._start_s = min((e.start_s for e in firsts), default=0.0)
        self._end_s = max((e.end_s for e in scheduled), default=0.0)
        self._attempts = [
            trace
            for (phase, number), trace in sorted(run.attempts.items())
            if attempts is None or (phase == "train" and number in attempts)
        ]
        self._flows = 0
        self._published: dict[int, list[tuple[float, int]]] = {}

    # ---- processes and threads ----

    def names(self, node_names: tuple[str, ...]) -> Iterator[Event]:
        devices = sorted({device for trace in self._attempts for device in trace.devices})
        for device in devices:
            yield from _named(device + 1, f"device {device}")
            for thread, name in _NAMES.items():
                yield _thread_name(device + 1, thread, name)
        ways = {(m.source, m.target) for trace in self._attempts for m in trace.moved}
        for source, target in sorted(ways):
            yield _thread_name(source + 1, _Thread.LINK + target, f"to device {target}")
        for node in self._run.sweeps:
            yield from _named(_OPTIMIZERS + node, f"optimizer {node_names[node]}")
            yield _thread_name(_OPTIMIZERS + node, 1, "passes")
        yield from _named(_SCHEDULER, "scheduler")
        yield _thread_name(_SCHEDULER, 1, "decisions")

    # ---- events ----

    def devices(self) -> Iterator[Event]:
        for trace in self._attempts:
            for device, device_trace in sorted(trace.devices.items()):
                yield from self._of_device(trace, device, device_trace)
            yield from self._links(trace)

    def sweeps(self) -> Iterator[Event]:
        for node, events in self._run.sweeps.items():
            for event in events:
                if self._all or self._start_s <= event.start_s <= self._end_s:
                    pid = _OPTIMIZERS + node
                    yield self._complete(pid, 1, event.text, event.start_s, event.end_s, event)
                    yield from self._flow_of_gradients(pid, event)

    def scheduled(self) -> Iterator[Event]:
        for event in self._scheduled:
            name = f"{event.text} {event.attempt}" if event.attempt else event.text
            yield self._complete(_SCHEDULER, 1, name, event.start_s, event.end_s, event)

    def announcements(self) -> Iterator[Event]:
        """Yields arrows from attempts to the first instruction of each device."""
        announced = {e.attempt: e for e in self._scheduled if e.text in ("attempt", "broken")}
        for trace in self._attempts:
            source = announced.get(trace.number)
            if source is None or trace.phase != "train":
                continue
            for device, device_trace in sorted(trace.devices.items()):
                firsts = [(_Thread.COMPUTE, work) for work in device_trace.computed[:1]]
                firsts += [(_Thread.ISSUE, work) for work in device_trace.issued[:1]]
                if firsts:
                    thread, work = min(firsts, key=lambda first: first[1].ready_s)
                    target = device + 1, thread, work.ready_s
                    start = _SCHEDULER, 1, source.start_s
                    yield from self._flow(start, target, "announcement")

    def loads(self, plan: Plan) -> Iterator[Event]:
        """Yields arrows to the load of a stage from the last sweep over its blocks in the previous
        attempt.
        """
        swept = self._last_sweeps()
        for trace in self._attempts:
            for device, device_trace in trace.devices.items() if trace.phase == "train" else ():
                lanes = (_Thread.COMPUTE, device_trace.loads), (_Thread.FETCH, device_trace.fetches)
                for thread, work in ((thread, work) for thread, works in lanes for work in works):
                    blocks = _loaded_blocks(work.instruction, plan)
                    sweeps = (swept.get((trace.number - 1, block)) for block in blocks)
                    before = [sweep for sweep in sweeps if sweep and sweep[0] <= work.ready_s]
                    if before:
                        _, start_s, pid = max(before)
                        target = device + 1, thread, work.ready_s
                        yield from self._flow((pid, 1, start_s), target, "weights")

    def _last_sweeps(self) -> dict[tuple[int, int], tuple[float, float, int]]:
        """Returns end, start and process of the shown sweep that wrote a block's weights, by
        attempt and block.
        """
        sweeps: dict[tuple[int, int], tuple[float, float, int]] = {}
        for node, events in self._run.sweeps.items():
            for event in events:
                name, _, block = event.text.partition(" ")
                shown = self._all or self._start_s <= event.start_s <= self._end_s
                if shown and block.isdigit() and name not in _SETTLING:
                    sweep = event.end_s, event.start_s, _OPTIMIZERS + node
                    key = event.attempt, int(block)
                    sweeps[key] = max(sweeps.get(key, sweep), sweep)
        return sweeps

    def _of_device(
        self, trace: AttemptTrace, device: int, device_trace: DeviceTrace
    ) -> Iterator[Event]:
        pid = device + 1
        for work in device_trace.computed:
            yield from self._waits(pid, work, device_trace.loads)
            yield self._work(pid, _Thread.COMPUTE, work)
        for work in device_trace.loads:
            yield self._work(pid, _Thread.COMPUTE, work)
        for work in device_trace.issued:
            yield self._work(pid, _Thread.ISSUE, work)
        for work in device_trace.fetches:
            yield self._work(pid, _Thread.FETCH, work)
        for work in device_trace.copies:
            yield self._work(pid, _COPIES[work.instruction.opcode], work)
        yield from self._publications(pid, device_trace)

    def _publications(self, pid: int, device_trace: DeviceTrace) -> Iterator[Event]:
        """Yields the publications of gradients. A box ends at the next publication, at most 0.1 ms
        later. Evaluations and attempts that broke earlier have no publications.
        """
        moments = sorted((moment, key) for key, moment in device_trace.published.items())
        following = (moment for moment, _ in moments[1:])
        for moment, (block, contribution) in moments:
            end_s = min(moment + 1e-4, next(following, inf))
            name = f"block {block}" + (f", contribution {contribution}" if contribution else "")
            yield self._span(pid, _Thread.OFFLOAD, name, moment, end_s, "publish", {})
            self._published.setdefault(block, []).append((moment, pid))

    def _waits(
        self, pid: int, work: TracedInstruction, loads: Iterable[TracedInstruction]
    ) -> Iterator[Event]:
        """Yields a wait, without the loads within it."""
        start_s, ready_s = work.event.start_s, work.ready_s
        inside = [w.event for w in loads if start_s <= w.event.start_s < ready_s]
        edges = [(start_s, start_s), *((e.start_s, e.end_s) for e in inside), (ready_s, ready_s)]
        for (_, free_s), (busy_s, _) in pairwise(edges):
            if busy_s > free_s:
                name = f"wait for {work.event.text.split(' keep=')[0]}"
                yield self._span(pid, _Thread.COMPUTE, name, free_s, busy_s, "wait", {})

    def _work(self, pid: int, thread: int, work: TracedInstruction) -> Event:
        event = work.event
        name = event.text.split(" keep=")[0].split(" peer=")[0]
        return self._complete(pid, thread, name, work.ready_s, event.end_s, event)

    # ---- transfers and arrows ----

    def _links(self, trace: AttemptTrace) -> Iterator[Event]:
        takers, senders = _takers(trace), _senders(trace)
        for moved in trace.moved:
            tensor, pid = moved.tensor, moved.source + 1
            name = f"{tensor.kind} {tensor.stage} {tensor.micro_batch}"
            thread = _Thread.LINK + moved.target
            yield self._span(pid, thread, name, moved.start_s, moved.arrived_s, "transfer", {})
            sender = senders.get((tensor, moved.target))
            if sender is not None:
                yield from self._flow(
                    (pid, _Thread.ISSUE, sender.ready_s), (pid, thread, moved.start_s), "send"
                )
            taker = takers.get((moved.target, tensor))
            if taker is not None:
                yield from self._flow(
                    (pid, thread, moved.start_s), (moved.target + 1, 1, taker.ready_s), "tensor"
                )

    def _flow_of_gradients(self, pid: int, event: TraceEvent) -> Iterator[Event]:
        """Yields an arrow from the last publication of a block to its sweep, once for each."""
        name, _, block = event.text.partition(" ")
        waiting = self._published.get(int(block), []) if block.isdigit() else []
        before = [item for item in waiting if item[0] <= event.start_s]
        if name in _SETTLING or not before:
            return
        moment, source = max(before)
        self._published[int(block)] = [item for item in waiting if item not in before]
        yield from self._flow(
            (source, _Thread.OFFLOAD, moment), (pid, 1, event.start_s), "gradients"
        )

    def _flow(
        self, source: tuple[int, int, float], target: tuple[int, int, float], name: str
    ) -> Iterator[Event]:
        """Yields both ends of an arrow, unless it leads back in time. Emulated clocks have such
        pairs, since Python may record an event late.
        """
        if target[2] < source[2]:
            return
        self._flows += 1
        for phase, (pid, thread, time_s) in (("s", source), ("f", target)):
            event: Event = {
                "name": name,
                "cat": "flow",
                "ph": phase,
                "id": self._flows,
                "ts": self._microseconds(time_s),
                "pid": pid,
                "tid": int(thread),
            }
            yield {**event, "bp": "e"} if phase == "f" else event

    # ---- single events ----

    def _complete(
        self, pid: int, thread: int, name: str, start_s: float, end_s: float, event: TraceEvent
    ) -> Event:
        arguments: Event = {"attempt": event.attempt, "what": event.text}
        if event.phase != "train":
            arguments["phase"] = event.phase
        if event.waited_s:
            arguments["waited_ms"] = round(1e3 * event.waited_s, 3)
        category = event.text.split(" ", 1)[0]
        return self._span(pid, thread, name, start_s, end_s, category, arguments)

    def _span(
        self,
        pid: int,
        thread: int,
        name: str,
        start_s: float,
        end_s: float,
        category: str,
        arguments: Event,
    ) -> Event:
        start = self._microseconds(start_s)
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": start,
            "dur": round(self._microseconds(end_s) - start, 1),
            "pid": pid,
            "tid": int(thread),
            "args": arguments,
        }

    def _microseconds(self, time_s: float) -> float:
        return round(1e6 * (time_s - self._start_s), 1)


def _firsts(run: TracedRun) -> Iterator[TraceEvent]:
    """Yields the first events of devices and optimizers."""
    for trace in run.attempts.values():
        for device_trace in trace.devices.values():
            for work in (*device_trace.computed[:1], *device_trace.issued[:1]):
                yield work.event
    for events in run.sweeps.values():
        yield from events[:1]


def _takers(trace: AttemptTrace) -> dict[tuple[int, Tensor], TracedInstruction]:
    """Returns the first instruction that takes a tensor, by device and tensor."""
    takers: dict[tuple[int, Tensor], TracedInstruction] = {}
    for device, device_trace in trace.devices.items():
        for work in device_trace.computed:
            tensor = taken_by(work.instruction)
            if tensor is not None:
                takers.setdefault((device, tensor), work)
    return takers


def _senders(trace: AttemptTrace) -> dict[tuple[Tensor, int], TracedInstruction]:
    """Returns the instruction that sends a tensor, by tensor and target."""
    return {
        (transferred(work.instruction), work.instruction.peer): work
        for device_trace in trace.devices.values()
        for work in device_trace.issued
        if isinstance(work.instruction, SENDS)
    }


def _loaded_blocks(instruction: Instruction, plan: Plan) -> range:
    """Returns the blocks that a FETCH_WEIGHTS loads; none for a stage that ``plan`` lacks, since
    the instruction may belong to another plan.
    """
    if not isinstance(instruction, FetchWeights):
        return range(0)
    forward = instruction.phase is Phase.FORWARD
    stages = plan.forward_stages if forward else plan.backward_stages
    return stages[instruction.stage].blocks if instruction.stage < len(stages) else range(0)


def _named(pid: int, name: str) -> Iterator[Event]:
    common = {"ph": "M", "pid": pid, "tid": 0}
    yield {**common, "name": "process_name", "args": {"name": name}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": pid}}


def _thread_name(pid: int, thread: int, name: str) -> Event:
    return {
        "ph": "M",
        "pid": pid,
        "tid": int(thread),
        "name": "thread_name",
        "args": {"name": name},
    }
