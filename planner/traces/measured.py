"""Attempts of a real run in the form of simulations: spans, bubbles, tail, time of a step.

Zero is when the first device begins to compute. Makespan, pipeline and tail mean what they mean in
:class:`~penstock.planner.simulate.Simulation`: the makespan ends with the last sweep or copy before
the decision. What else belongs to a step lies between two attempts: messages, decision, journal,
the next batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf

from penstock.host.sums import added
from penstock.planner.simulate import DeviceTimes, Span
from penstock.planner.traces.traced import (
    AttemptTrace,
    DeviceTrace,
    TracedInstruction,
    TracedRun,
    between,
)
from penstock.protocol.plan.instructions import (
    Instruction,
    OffloadGradients,
    Opcode,
    ReduceGradients,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.semantics import Lane
from penstock.protocol.run.trace import TraceEvent

_DECISIONS = ("commit", "amend", "skip")
_SETTLING = ("settle", "finish")


@dataclass(frozen=True, kw_only=True)
class MeasuredAttempt:
    """One complete attempt of a plan; all times are on the trace's clock but those of spans.

    ``announced_s``: the scheduler starts to announce the attempt. ``judged_s``: the scheduler has
    all reports that it needs. ``decided_s``: the decision is made, after amends. ``ended_s``: all
    members have the decision. ``step_s``: until the next attempt is announced, ``None`` if
    something else came between. ``sweeps`` begin before ``judged_s``, by node, ``amends`` later;
    ``pulls`` are moments at which gradients of other nodes had arrived. ``copies``: devices copy
    weights in, which is a part of the attempt as it is of simulations; otherwise loads wait for the
    commit.
    """

    plan: Plan
    trace: AttemptTrace
    sweeps: Mapping[int, tuple[TraceEvent, ...]]
    decision: str
    announced_s: float
    judged_s: float
    decided_s: float
    ended_s: float
    step_s: float | None
    amends: Mapping[int, tuple[TraceEvent, ...]] = field(default_factory=dict)
    pulls: Mapping[int, tuple[TraceEvent, ...]] = field(default_factory=dict)
    copies: bool = False

    @property
    def number(self) -> int:
        """The attempt's number."""
        return self.trace.number

    @cached_property
    def origin_s(self) -> float:
        """The moment at which the first device begins to copy, or has its first input."""
        devices = self.trace.devices.values()
        moments = [work.ready_s for device in devices for work in device.computed]
        if self.copies:
            moments += [work.event.start_s for device in devices for work in device.fetches]
        return min(moments)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All work that occupied a device, link or node, by start."""
        unsorted = [
            *self._device_spans(),
            *self._link_spans(),
            *self._sum_spans(),
            *self._pass_spans(),
        ]
        # What ends before zero, such as the loads that the first computation waits for, lies
        # between two attempts.
        inside = (span for span in unsorted if span.start_s >= 0.0)
        return tuple(sorted(inside, key=lambda span: (span.start_s, span.end_s)))

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last work before the decision ends."""
        return max(span.end_s for span in self.spans)

    @cached_property
    def pipeline_s(self) -> float:
        """Seconds until the last compute instruction ends."""
        return max(span.end_s for span in self.spans if span.lane is Lane.COMPUTE)

    @property
    def optimizer_tail_s(self) -> float:
        """Seconds from the end of the last compute instruction to the end of all work."""
        return self.makespan_s - self.pipeline_s

    @cached_property
    def devices(self) -> tuple[DeviceTimes, ...]:
        """Seconds that each device computes, and does not, while any does."""
        busy = [
            added(work.seconds for work in self.trace.devices[device].computed)
            for device in range(self.plan.num_devices)
        ]
        return tuple(DeviceTimes(busy_s=busy_s, idle_s=self.pipeline_s - busy_s) for busy_s in busy)

    @property
    def bubble_ratio(self) -> float:
        """The share of the pipeline's time in which devices do not compute."""
        idle_s = added(device.idle_s for device in self.devices)
        return idle_s / (self.pipeline_s * len(self.devices))

    @property
    def between_s(self) -> float | None:
        """Seconds of the step that are not in :attr:`makespan_s`; ``None`` where it is unknown."""
        return None if self.step_s is None else self.step_s - self.makespan_s

    def published_s(self, block: int) -> float | None:
        """Returns when all gradients of a block were published, on the trace's clock."""
        moments = [
            moment
            for device in self.trace.devices.values()
            for (published, _), moment in device.published.items()
            if published == block
        ]
        return max(moments, default=None)

    def _span(
        self, lane: Lane, place: int, label: str, start_s: float, end_s: float, peer: int | None
    ) -> Span:
        return Span(
            lane=lane,
            place=place,
            label=label,
            start_s=start_s - self.origin_s,
            end_s=end_s - self.origin_s,
            peer=peer,
        )

    def _device_spans(self) -> Iterator[Span]:
        for device, trace in self.trace.devices.items():
            for work in trace.computed:
                yield self._of_work(Lane.COMPUTE, device, work)
            for work in trace.updates:
                yield self._of_work(Lane.UPDATE, device, work)
            for work in trace.loads + trace.fetches:
                yield self._of_work(Lane.FETCH, device, work)
            for work in trace.copies or trace.issued:
                if isinstance(work.instruction, SwapOut | SwapIn):
                    yield self._of_work(Lane.SWAP, device, work)
            yield from self._offload_spans(device, trace)

    def _of_work(self, lane: Lane, device: int, work: TracedInstruction) -> Span:
        label = short_label(work.instruction)
        return self._span(lane, device, label, work.ready_s, work.event.end_s, None)

    def _offload_spans(self, device: int, trace: DeviceTrace) -> Iterator[Span]:
        """Yields offloads as the device knows them; or until each contribution of a stage was
        published, one after the other.
        """
        known = [w for w in trace.copies if isinstance(w.instruction, OffloadGradients)]
        if known:
            yield from (self._of_work(Lane.OFFLOAD, device, work) for work in known)
            return
        free_s = -inf
        for work in trace.issued:
            if isinstance(work.instruction, OffloadGradients):
                start_s, label = max(work.ready_s, free_s), short_label(work.instruction)
                moments = sorted(_published(work, trace, self.plan))[:-1]
                for moment in (*moments, offloaded_s(work, trace, self.plan)):
                    free_s = max(start_s, moment)
                    yield self._span(Lane.OFFLOAD, device, label, start_s, free_s, None)
                    start_s = free_s

    def _link_spans(self) -> Iterator[Span]:
        for moved in self.trace.moved:
            tensor = moved.tensor
            label = f"{tensor.kind} {tensor.stage} {tensor.micro_batch}"
            yield self._span(
                Lane.LINK, moved.source, label, moved.start_s, moved.arrived_s, moved.target
            )

    def _sum_spans(self) -> Iterator[Span]:
        """Yields spans from the sender's REDUCE_GRADIENTS to the arrival where sums are made."""
        for device, trace in self.trace.devices.items():
            for work in trace.issued:
                if isinstance(work.instruction, ReduceGradients):
                    label, stage = short_label(work.instruction), work.instruction.stage
                    for target, other in self.trace.devices.items():
                        if stage in other.sums:
                            yield self._span(
                                Lane.REDUCE,
                                device,
                                label,
                                work.event.start_s,
                                max(work.event.start_s, other.sums[stage]),
                                target,
                            )

    def _pass_spans(self) -> Iterator[Span]:
        for node, sweeps in self.sweeps.items():
            for event in sweeps:
                name, block = event.text.split()
                stage = self.plan.backward_stage_of(int(block))
                label = f"{'S' if name in _SETTLING else 'U'} {stage}"
                yield self._span(Lane.OPTIMIZER, node, label, event.start_s, event.end_s, None)


def offloaded_s(work: TracedInstruction, trace: DeviceTrace, plan: Plan) -> float:
    """Returns when the gradients of an OFFLOAD_GRADIENTS were all published; not before its end."""
    return max([work.event.end_s, *_published(work, trace, plan)])


def _published(work: TracedInstruction, trace: DeviceTrace, plan: Plan) -> list[float]:
    blocks = plan.backward_stages[work.instruction.stage].blocks  # type: ignore[attr-defined]  # an offload
    moments = [s for (block, _), s in trace.published.items() if block in blocks]
    return [s for s in moments if s >= work.event.start_s]


def short_label(instruction: Instruction) -> str:
    """Returns an instruction as labels of simulated spans have it: ``F 3 0``, ``BW 3 0,1``, ``FW 3
    forward``.
    """
    words = [instruction.opcode.value]
    for name in ("stage", "block", "micro_batch", "phase"):
        if hasattr(instruction, name):
            words.append(str(getattr(instruction, name)))
    if instruction.opcode is Opcode.BACKWARD_WEIGHT:
        words.append(",".join(map(str, instruction.micro_batches)))  # type: ignore[attr-defined]  # has it
    return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Attempts of one plan. ``left_out`` counts the others by reason."""

    attempts: tuple[MeasuredAttempt, ...]
    left_out: Mapping[str, int]


def measure(run: TracedRun, plan: Plan, *, copies: bool = False) -> Measurement:
    """Returns the complete attempts of ``plan`` in a run, in order; ``copies`` as in
    :class:`MeasuredAttempt`.
    """
    complete: list[MeasuredAttempt] = []
    left_out: Counter[str] = Counter()
    for announced, judged, following in _decided(run.scheduled):
        trace = run.attempts.get(("train", announced.attempt))
        if judged is None and trace is None and announced.text != "broken":
            continue  # it ends the step of a sampled one
        if announced.text == "broken" or judged is None:
            left_out["broken off"] += 1
            continue
        reason = _why_not(trace, plan)
        if trace is None or reason:
            left_out[reason] += 1
            continue
        complete.append(
            MeasuredAttempt(
                plan=plan,
                trace=trace,
                sweeps={
                    node: tuple(between(sweeps, announced.start_s, announced.end_s))
                    for node, sweeps in run.sweeps.items()
                },
                decision=judged.text,
                announced_s=announced.start_s,
                judged_s=announced.end_s,
                decided_s=judged.start_s,
                ended_s=judged.end_s,
                amends={
                    node: tuple(between(sweeps, announced.end_s, judged.start_s))
                    for node, sweeps in run.sweeps.items()
                },
                pulls={
                    node: tuple(between(pulls, announced.start_s, announced.end_s))
                    for node, pulls in run.pulls.items()
                },
                step_s=None if following is None else following.start_s - announced.start_s,
                copies=copies,
            )
        )
    return Measurement(attempts=tuple(complete), left_out=dict(left_out))


def _decided(
    scheduled: Sequence[TraceEvent],
) -> Iterator[tuple[TraceEvent, TraceEvent | None, TraceEvent | None]]:
    """Yields attempts with their decision, and the next attempt where it follows at once."""
    for index, event in enumerate(scheduled):
        if event.text not in ("attempt", "broken"):
            continue
        later = [*scheduled[index + 1 : index + 4], None, None, None]
        if later[0] is not None and later[0].text == "amending":
            later.pop(0)
        judged, following = later[0], later[1]
        if judged is not None and judged.text not in _DECISIONS:
            judged = None
        if following is not None and following.text not in ("attempt", "broken"):
            following = None
        yield event, judged, following


def _why_not(trace: AttemptTrace | None, plan: Plan) -> str:
    """Returns why an attempt is no complete one of the plan, or an empty text."""
    if trace is None:
        return "without the events of any device"
    if set(trace.devices) != set(range(plan.num_devices)):
        return "without the events of some device"
    if any(trace.devices[d].program != list(p) for d, p in enumerate(plan.programs)):
        return "of another plan"
    return ""


def overlapping(spans: Sequence[Span]) -> tuple[Span, Span] | None:
    """Returns two spans that occupy the same lane (of links: the same way) at once, if there are
    any.
    """
    lanes: dict[tuple[Lane, int, int | None], list[Span]] = {}
    for span in spans:
        lanes.setdefault((span.lane, span.place, span.peer), []).append(span)
    for spans_of_lane in lanes.values():
        for first, second in pairwise(sorted(spans_of_lane, key=lambda s: (s.start_s, s.end_s))):
            if second.start_s < first.end_s - 1e-9:
                return first, second
    return None
