"""The events of a traced run, sorted by attempt and device, and the tensors between devices.

:mod:`penstock.protocol.run.trace` reads the files; :mod:`penstock.planner.traces.measured` compares
attempts with a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.host.errors import ProtocolError
from penstock.planner.schedule.tensors import Tensor, TensorKind, transferred
from penstock.protocol.plan.instructions import (
    FetchWeights,
    Instruction,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
    parse_instruction,
)
from penstock.protocol.run.trace import TraceEvent, TraceLane
from penstock.protocol.run.trace_reading import RunTrace

SENDS = (SendActivation, SendGradient, SendCheckpoint)
"""Instructions that hand a tensor over to another device."""
_RECEIVES = (RecvActivation, RecvGradient, RecvCheckpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedInstruction:
    """An instruction that a device executed; ``computes`` from ``start_s`` plus ``waited_s`` on."""

    instruction: Instruction
    event: TraceEvent

    @property
    def ready_s(self) -> float:
        """The moment at which the instruction's input was there."""
        return self.event.start_s + self.event.waited_s

    @property
    def seconds(self) -> float:
        """Seconds of the instruction without waiting."""
        return self.event.end_s - self.ready_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A tensor that went from one device to another.

    ``posted_s``: the receiver had said that it expects it; ``sent_s``: the sender had handed it
    over; ``start_s``: it was being sent and what went before it on the same way had arrived;
    ``arrived_s`` is never before that.
    """

    tensor: Tensor
    source: int
    target: int
    posted_s: float
    start_s: float
    sent_s: float
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory that a device held; ``during``: an instruction, where that is known."""

    num_bytes: float
    at_s: float
    during: str

    @classmethod
    def of(cls, event: TraceEvent) -> Peak:
        """Reads an event of :attr:`TraceLane.MEMORY`.

        Raises:
            ValueError: it is none.
        """
        num_bytes, _, during = event.text.partition(" ")
        return cls(num_bytes=float(num_bytes), at_s=event.end_s, during=during)


@dataclass(kw_only=True)
class DeviceTrace:
    """The work of one device in one attempt, each list by time.

    ``computed`` and ``issued`` are its instructions, all of them in ``program``. The interpreter
    did ``loads`` of weights within a wait; ``fetches`` ran on a stream of their own. ``arrivals``
    by tensor, ``sums`` by the backward stage that sent its gradients; ``published`` are (block,
    contribution) with the moment; ``updates`` are previews. ``copies``, of offloads and swaps, are
    known of some devices; ``batch``: it was read.
    """

    computed: list[TracedInstruction] = field(default_factory=list)
    issued: list[TracedInstruction] = field(default_factory=list)
    loads: list[TracedInstruction] = field(default_factory=list)
    fetches: list[TracedInstruction] = field(default_factory=list)
    arrivals: dict[Tensor, float] = field(default_factory=dict)
    sums: dict[int, float] = field(default_factory=dict)
    published: dict[tuple[int, int], float] = field(default_factory=dict)
    updates: list[TracedInstruction] = field(default_factory=list)
    copies: list[TracedInstruction] = field(default_factory=list)
    program: list[Instruction] = field(default_factory=list)
    peak: Peak | None = None
    batch: TraceEvent | None = None


@dataclass(kw_only=True)
class AttemptTrace:
    """One attempt, or one batch of an evaluation. ``devices`` by number."""

    phase: str
    number: int
    devices: dict[int, DeviceTrace] = field(default_factory=dict)

    @cached_property
    def moved(self) -> tuple[Moved, ...]:
        """All transfers with two known ends, by arrival at each target."""
        sends: dict[tuple[Tensor, int], tuple[int, TracedInstruction]] = {}
        for device, trace in self.devices.items():
            for work in trace.issued:
                if isinstance(work.instruction, SENDS):
                    key = transferred(work.instruction), work.instruction.peer
                    sends[key] = device, work
        transfers: list[Moved] = []
        free: dict[tuple[int, int], float] = defaultdict(float)
        for target, trace in sorted(self.devices.items()):
            posted = {
                transferred(work.instruction): work.event.start_s
                for work in trace.issued
                if isinstance(work.instruction, _RECEIVES)
            }
            for tensor, arrived_s in sorted(trace.arrivals.items(), key=lambda item: item[1]):
                if (tensor, target) in sends:
                    source, work = sends[tensor, target]
                    start_s = max(work.event.start_s, free[source, target])
                    arrived_s = free[source, target] = max(arrived_s, start_s)
                    transfers.append(
                        Moved(
                            tensor=tensor,
                            source=source,
                            target=target,
                            posted_s=posted.get(tensor, arrived_s),
                            start_s=start_s,
                            sent_s=work.event.end_s,
                            arrived_s=arrived_s,
                        )
                    )
        return tuple(transfers)


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """``attempts`` by (phase, number); ``sweeps`` and ``pulls`` by node; ``scheduled``: the
    scheduler's events.

    Events that make no sense (an unknown member or instruction) are counted in ``strange``.
    """

    attempts: Mapping[tuple[str, int], AttemptTrace]
    sweeps: Mapping[int, tuple[TraceEvent, ...]]
    scheduled: tuple[TraceEvent, ...]
    strange: int
    pulls: Mapping[int, tuple[TraceEvent, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: RunTrace, node_names: Sequence[str]) -> TracedRun:
        """Sorts the events of all processes; a node's index in ``node_names`` is its number."""
        sorter = _Sorter(node_names)
        for life in trace.members:
            sorter.take(life.member, life.events)
        for attempt in sorter.attempts.values():
            for device in attempt.devices.values():
                _put_loads_first(device)
        return cls(
            attempts=sorter.attempts,
            sweeps={node: _by_start(events) for node, events in sorted(sorter.sweeps.items())},
            scheduled=_by_start(sorter.scheduled),
            strange=sorter.strange,
            pulls={node: _by_start(events) for node, events in sorted(sorter.pulls.items())},
        )


def _put_loads_first(trace: DeviceTrace) -> None:
    """Makes instructions ready when the loads within them are done. The wait that they are part of
    is known by its length only, and began a little after the instruction did.
    """
    for load in trace.loads:
        for index, work in enumerate(trace.computed):
            if work.event.start_s <= load.event.start_s < work.event.end_s:
                waited_s = max(work.event.waited_s, load.event.end_s - work.event.start_s)
                event = replace(work.event, waited_s=waited_s)
                trace.computed[index] = replace(work, event=event)


def _by_start(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    return tuple(sorted(events, key=lambda event: event.start_s))


class _Sorter:
    def __init__(self, node_names: Sequence[str]) -> None:
        self.attempts: dict[tuple[str, int], AttemptTrace] = {}
        self.sweeps: dict[int, list[TraceEvent]] = defaultdict(list)
        self.pulls: dict[int, list[TraceEvent]] = defaultdict(list)
        self.scheduled: list[TraceEvent] = []
        self.strange = 0
        self._nodes = {f"optimizerd.{name}": index for index, name in enumerate(node_names)}
        self._parsed: dict[str, Instruction] = {}

    def take(self, member: str, events: Iterable[TraceEvent]) -> None:
        kind, _, number = member.partition(".")
        if kind == "worker" and number.isdigit():
            for event in events:
                self._of_device(int(number), event)
        elif member in self._nodes:
            for event in events:
                lists = self.pulls if event.lane is TraceLane.PULL else self.sweeps
                lists[self._nodes[member]].append(event)
        elif member == "schedulerd":
            self.scheduled += events
        else:
            self.strange += sum(1 for _ in events)

    def _of_device(self, device: int, event: TraceEvent) -> None:
        key = event.phase, event.attempt
        attempt = self.attempts.setdefault(key, AttemptTrace(phase=key[0], number=key[1]))
        trace = attempt.devices.setdefault(device, DeviceTrace())
        try:
            if event.lane is TraceLane.ARRIVAL:
                kind, stage, micro_batch = event.text.split()
                if kind == "reduction":
                    trace.sums[int(stage)] = event.end_s
                    return
                tensor = Tensor(
                    kind=TensorKind(kind), stage=int(stage), micro_batch=int(micro_batch)
                )
                trace.arrivals[tensor] = event.end_s
            elif event.lane is TraceLane.OFFLOAD:
                block, contribution = map(int, event.text.split())
                trace.published[block, contribution] = event.end_s
            elif event.lane is TraceLane.MEMORY:
                trace.peak = Peak.of(event)
            elif event.lane is TraceLane.DATA:
                trace.batch = event
            else:
                self._of_interpreter(trace, event)
        except (ProtocolError, ValueError):
            self.strange += 1

    def _of_interpreter(self, trace: DeviceTrace, event: TraceEvent) -> None:
        if event.text not in self._parsed:
            self._parsed[event.text] = parse_instruction(event.text)
        work = TracedInstruction(instruction=self._parsed[event.text], event=event)
        if event.lane is TraceLane.FETCH:
            trace.fetches.append(work)
        elif event.lane is TraceLane.UPDATE:
            trace.updates.append(work)
        elif event.lane is TraceLane.COPY:
            trace.copies.append(work)
        elif event.lane is TraceLane.COMPUTE and isinstance(work.instruction, FetchWeights):
            trace.loads.append(work)
        else:
            computes = event.lane is TraceLane.COMPUTE
            (trace.computed if computes else trace.issued).append(work)
            trace.program.append(work.instruction)


def between(events: Iterable[TraceEvent], start_s: float, end_s: float) -> Iterator[TraceEvent]:
    """Yields the events that begin in an interval."""
    return (event for event in events if start_s <= event.start_s < end_s)
