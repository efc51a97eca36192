"""Costs from the trace of a run, so that a schedule's own prediction can be judged.

A trace has durations, but no amounts of data. So bytes and parameters are amounts that a machine of
:data:`BYTES_PER_S` and :data:`PARAMETERS_PER_S` moves and updates in the measured time.
``output_bytes`` are those of the latency of a transfer, ``weight_bytes`` and ``gradient_bytes``
those of a copy, ``parameters`` those of an optimizer's sweep. Memory figures of a simulation with
these costs mean nothing. Seconds of a stage are shared out evenly among the blocks that it
computes.

Times of instructions and transfers are means over an attempt, then medians over attempts. A median
over an attempt would be too little: the first micro-batch of a stage also binds weights and clears
gradients. To those of compute instructions come

- the **overhead** of an instruction: the interpreter's work between compute instructions, per
  compute instruction. That is sends, loads of weights if the device has no copy engine, and its own
  work.
- the **latency** of a transfer: from the end of a send until a waiting consumer has its input. The
  send ends no earlier than the arrival of tensors before it on its way, between nodes through
  either of their NICs. There is one latency within nodes, one between them.
- the **hops** of the optimizer: from the last byte of gradients to the start of the sweep, and from
  one sweep to the next.

Weights of the node's own memory give the time of a copy. Fetches with blocks of other nodes take
longer. The difference is those blocks' way over the network, in competition with all other traffic.

As in the simulator, times do not depend on other work of the machine at that moment. So the fit is
an average if workers and optimizer share cores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import TypeVar

from penstock.host.sums import added
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.schedule.layout import StageLayout
from penstock.planner.traces.measured import MeasuredAttempt, offloaded_s
from penstock.planner.traces.traced import TracedInstruction
from penstock.protocol.plan.instructions import (
    BackwardWeight,
    Forward,
    Keep,
    OffloadGradients,
    Opcode,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.plan.reduction import Reduction

BYTES_PER_S = float(2**30)
PARAMETERS_PER_S = float(2**30)
"""Rates of the machine that costs are fitted to. They are powers of two: a time that becomes an
amount, and a time again in the simulation, is the same to the last bit.
"""

StageKey = tuple[Opcode, int]
_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The facts of a trace about costs.

    ``stages``: seconds of each compute opcode and stage (of a BACKWARD_WEIGHT per micro-batch).
    ``overhead_s``, ``latency_s``, ``nic_s`` (the latency between nodes), ``gradients_s`` (published
    to sweep) and ``sweep_hop_s``: see the module. ``sweeps``: seconds by block. ``settle_speed``:
    of blocks that are settled first, relative to these. ``swaps``: seconds in which all kept
    tensors of a forward of a stage go, or come back.
    """

    plan: Plan
    devices_per_node: int
    stages: Mapping[StageKey, float]
    overhead_s: float
    latency_s: float
    nic_s: float
    gradients_s: float
    sweep_hop_s: float
    sweeps: Mapping[int, float]
    settle_speed: float
    offloads: Mapping[int, float]
    fetches: Mapping[tuple[str, int], float]
    swaps: Mapping[int, float]

    @classmethod
    def of(cls, attempts: Sequence[MeasuredAttempt], devices_per_node: int) -> Fit:
        """Fits costs to attempts of one plan, at least one."""
        ready, hops = _sweep_hops(attempts)
        latency_s, nic_s = _latencies(attempts, devices_per_node)
        return cls(
            plan=attempts[0].plan,
            devices_per_node=devices_per_node,
            stages=_medians(map(_stage_means, attempts)),
            overhead_s=median(map(_overhead_s, attempts)),
            latency_s=latency_s,
            nic_s=nic_s,
            gradients_s=_median(ready),
            sweep_hop_s=_median(hops),
            sweeps=_medians(map(_sweep_seconds, attempts)),
            settle_speed=_settle_speed(attempts),
            offloads=_medians(map(_offload_seconds, attempts)),
            fetches=_medians(map(_fetch_seconds, attempts)),
            swaps=_medians(map(_swap_seconds, attempts)),
        )

    @property
    def cluster(self) -> Cluster:
        """The machine that :attr:`costs` are fitted to."""
        return Cluster(
            devices_per_node=self.devices_per_node,
            fetch_bandwidth=BYTES_PER_S,
            offload_bandwidth=BYTES_PER_S,
            peer_bandwidth=BYTES_PER_S,
            # The same outputs cross NICs, in other times.
            nic_bandwidth=BYTES_PER_S * (self.latency_s / self.nic_s if self.nic_s else 1.0),
            read_bandwidth=self._read_bandwidth,
            optimizer_rate=PARAMETERS_PER_S,
            settle_speed=self.settle_speed,
            device_optimizer_rate=PARAMETERS_PER_S,
            update_fetch_bytes=0.0,  # in what the UPDATE took
            update_offload_bytes=0.0,
        )

    @property
    def costs(self) -> Costs:
        """Returns costs of blocks with the sums of the stages."""
        plan, layout = self.plan, StageLayout.of(self.plan)
        forward = _shared(self._of(Opcode.FORWARD), _computed_ranges(layout, plan))
        ranges = [stage.blocks for stage in plan.backward_stages]
        recompute = _shared(self._of(Opcode.RECOMPUTE), ranges)
        whole = _shared(self._of(Opcode.BACKWARD), ranges)
        inputs = _shared(self._of(Opcode.BACKWARD_INPUT), ranges)
        weights = _shared(self._of(Opcode.BACKWARD_WEIGHT), ranges)
        offloads = {s: seconds + self.gradients_s for s, seconds in self.offloads.items()}
        gradients = _shared(offloads, ranges)
        fetched = self._copied_by_block
        kept = _shared(self.swaps, [stage.blocks for stage in plan.forward_stages])
        blocks = [
            BlockCost(
                forward_s=forward.get(block, 0.0),
                recompute_s=recompute.get(block, 0.0),
                backward_input_s=inputs.get(block, whole.get(block, 0.0)),
                backward_weight_s=weights.get(block, 0.0),
                output_bytes=BYTES_PER_S * self.latency_s,
                parameters=PARAMETERS_PER_S * self._pass_s(block),
                gradient_bytes=BYTES_PER_S * gradients.get(block, 0.0),
                weight_bytes=BYTES_PER_S * fetched.get(block, 0.0),
                activation_bytes=BYTES_PER_S * kept.get(block, 0.0),
            )
            for block in range(plan.num_blocks)
        ]
        return Costs(blocks=_with_drops(blocks, plan), instruction_s=self.overhead_s)

    def copied_s(self, phase: str, stage: int) -> float:
        """Returns the seconds of a fetched stage's copy to the device, without what others' blocks
        take on their way here.
        """
        blocks, remote = self._read((phase, stage))
        copied = self._copied_by_block
        return added(copied.get(block, 0.0) for block in blocks) if remote else inf

    def _pass_s(self, block: int) -> float:
        return self.sweeps[block] + self.sweep_hop_s if block in self.sweeps else 0.0

    def _of(self, opcode: Opcode) -> dict[int, float]:
        return {stage: seconds for (code, stage), seconds in self.stages.items() if code is opcode}

    @cached_property
    def _reduction(self) -> Reduction:
        return Reduction.of(self.plan)

    @cached_property
    def _copied_by_block(self) -> dict[int, float]:
        """Returns seconds by block of fetches from the node's own memory: means over the forward
        and the backward buffers. Blocks that only other nodes own have the mean of all blocks.
        """
        samples: dict[int, list[float]] = defaultdict(list)
        for key, seconds in self.fetches.items():
            blocks, remote = self._read(key)
            if not remote:
                for block in blocks:
                    samples[block].append(seconds / len(blocks))
        usual = _mean([value for values in samples.values() for value in values])
        fetched = {block for key in self.fetches for block in self._read(key)[0]}
        return {block: fmean(samples[block]) if samples[block] else usual for block in fetched}

    @property
    def _read_bandwidth(self) -> float:
        """Returns the weights of other nodes over the seconds that fetches take longer than their
        copies.
        """
        copied, amount, total_s = self._copied_by_block, 0.0, 0.0
        for key, seconds in self.fetches.items():
            blocks, remote = self._read(key)
            if remote:
                amount += BYTES_PER_S * added(copied[block] for block in remote)
                total_s += max(0.0, seconds - added(copied[block] for block in blocks))
        return amount / total_s if amount and total_s else inf

    def _read(self, fetched: tuple[str, int]) -> tuple[range, list[int]]:
        """Returns the blocks of a fetched stage, and those of them that another node owns."""
        phase, number = fetched
        stages = self.plan.forward_stages if phase == "forward" else self.plan.backward_stages
        stage, reduction = stages[number], self._reduction
        node = stage.device // self.devices_per_node
        owners = {b: reduction.owner_device(b) // self.devices_per_node for b in stage.blocks}
        return stage.blocks, [block for block, owner in owners.items() if owner != node]


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _medians(attempts: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    """Returns the median of each key over all attempts that have it."""
    seconds: dict[_Key, list[float]] = defaultdict(list)
    for values in attempts:
        for key, value in values.items():
            seconds[key].append(value)
    return {key: median(values) for key, values in seconds.items()}


def _stage_means(attempt: MeasuredAttempt) -> dict[StageKey, float]:
    samples: dict[StageKey, list[float]] = defaultdict(list)
    for work in _computed(attempt):
        instruction = work.instruction
        key = instruction.opcode, instruction.stage  # type: ignore[attr-defined]  # all but UPDATE have it
        batches = len(instruction.micro_batches) if isinstance(instruction, BackwardWeight) else 1
        samples[key].append(work.seconds / batches)
    return {key: fmean(values) for key, values in samples.items()}


def _computed(attempt: MeasuredAttempt) -> Iterator[TracedInstruction]:
    for trace in attempt.trace.devices.values():
        yield from (work for work in trace.computed if hasattr(work.instruction, "stage"))


def _overhead_s(attempt: MeasuredAttempt) -> float:
    """Returns the interpreters' time from the first to the last compute instruction of their device
    that is neither computing nor waiting, per compute instruction.
    """
    total_s, count = 0.0, 0
    for trace in attempt.trace.devices.values():
        works = trace.computed
        if not works:
            continue
        window_s = works[-1].event.end_s - works[0].ready_s
        waited_s = added(work.event.waited_s for work in works[1:])
        loaded_s = added(
            load.event.end_s - load.event.start_s
            for load in trace.loads
            if load.event.start_s >= works[0].ready_s
        )
        total_s += window_s - waited_s - added(work.seconds for work in works) + loaded_s
        count += len(works)
    return max(0.0, total_s) / max(1, count)  # rounding may leave less than nothing


def _latencies(attempts: Sequence[MeasuredAttempt], devices_per_node: int) -> tuple[float, float]:
    """Returns the latency of transfers within nodes, and of those between them: medians over
    attempts. If one kind has no transfers, it has the latency of the other.

    A latency is the way of a message that the receiver expects already, and the time until a
    waiting consumer goes on: means. Other messages may be noticed later without harm.
    """
    inside: list[float] = []
    between: list[float] = []
    for attempt in attempts:
        waking: list[float] = []
        for trace in attempt.trace.devices.values():
            waking += _wakings(trace.computed, sorted(trace.arrivals.values()))
        near, far = _ways(attempt, devices_per_node)
        inside += [_mean(near) + _mean(waking)] if near or not far else []
        between += [_mean(far) + _mean(waking)] if far else []
    latency_s = _median(inside) if inside else _median(between)
    return latency_s, _median(between) if between else latency_s


def _ways(attempt: MeasuredAttempt, devices_per_node: int) -> tuple[list[float], list[float]]:
    """Returns the seconds that expected messages were under way, within nodes and between them.

    A message between nodes starts when both NICs are free of those that arrived before it.
    """
    near: list[float] = []
    far: list[float] = []
    free: dict[tuple[str, int], float] = defaultdict(float)
    for moved in sorted(attempt.trace.moved, key=lambda moved: moved.arrived_s):
        start_s = max(moved.sent_s, moved.start_s)
        nodes = moved.source // devices_per_node, moved.target // devices_per_node
        if nodes[0] != nodes[1]:
            nics = ("out", nodes[0]), ("in", nodes[1])
            start_s = max(start_s, *(free[nic] for nic in nics))
            free.update(dict.fromkeys(nics, moved.arrived_s))
        if moved.posted_s <= moved.sent_s:
            (near if nodes[0] == nodes[1] else far).append(max(0.0, moved.arrived_s - start_s))
    return near, far


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _wakings(works: Iterable[TracedInstruction], moments: Sequence[float]) -> Iterator[float]:
    for work in works:
        inside = [m for m in moments if work.event.start_s < m <= work.ready_s]
        if inside:
            yield work.ready_s - inside[-1]


def _sweep_seconds(attempt: MeasuredAttempt) -> dict[int, float]:
    """Returns, by block, the seconds of what ran after its gradients were there: a settle before
    that is not the tail's. Of a block that a device updates these are the update's.
    """
    totals: dict[int, float] = defaultdict(float)
    for sweeps in attempt.sweeps.values():
        for event in sweeps:
            block = int(event.text.split()[1])
            published_s = attempt.published_s(block)
            if published_s is not None and event.start_s >= published_s - 1e-3:
                totals[block] += event.end_s - event.start_s
    for trace in attempt.trace.devices.values():
        for work in trace.updates:
            totals[work.instruction.block] = work.seconds  # type: ignore[attr-defined]  # an UPDATE
    return dict(totals)


def _settle_speed(attempts: Iterable[MeasuredAttempt]) -> float:
    """Returns how many times as fast blocks were settled as what ran behind their gradients."""
    settling_s = passing_s = 0.0
    for attempt in attempts:
        after = _sweep_seconds(attempt)
        for sweeps in attempt.sweeps.values():
            for event in sweeps:
                name, block = event.text.split()
                if name == "settle" and int(block) in after:
                    settling_s += event.end_s - event.start_s
                    passing_s += after[int(block)]
    return passing_s / settling_s if settling_s > 0.0 and passing_s > 0.0 else 1.0


def _sweep_hops(attempts: Iterable[MeasuredAttempt]) -> tuple[list[float], list[float]]:
    """Returns the seconds from publication to sweep where the optimizer was idle, and from sweep to
    sweep where it was not.
    """
    ready: list[float] = []
    hops: list[float] = []
    for attempt in attempts:
        for sweeps in attempt.sweeps.values():
            for before, event in pairwise(sweeps):
                published_s = attempt.published_s(int(event.text.split()[1]))
                if published_s is None or event.start_s < published_s:
                    continue
                if published_s > before.end_s:
                    ready.append(event.start_s - published_s)
                else:
                    hops.append(event.start_s - before.end_s)
    return ready, hops


def _offload_seconds(attempt: MeasuredAttempt) -> dict[int, float]:
    reduction = Reduction.of(attempt.plan)
    return {
        work.instruction.stage: offloaded_s(work, trace, attempt.plan) - work.ready_s
        for trace in attempt.trace.devices.values()
        for work in trace.issued
        if isinstance(work.instruction, OffloadGradients)
        and reduction.publishes(work.instruction.stage)
    }


def _fetch_seconds(attempt: MeasuredAttempt) -> dict[tuple[str, int], float]:
    return {
        (work.instruction.phase.value, work.instruction.stage): work.seconds  # type: ignore[attr-defined]  # a fetch
        for trace in attempt.trace.devices.values()
        for work in trace.fetches
    }


def _swap_seconds(attempt: MeasuredAttempt) -> dict[int, float]:
    """Returns, by forward stage, the seconds of a swap of everything, where devices know them."""
    samples: dict[int, list[float]] = defaultdict(list)
    for trace in attempt.trace.devices.values():
        for work in trace.copies:
            swap = work.instruction
            if isinstance(swap, SwapOut | SwapIn):
                samples[swap.stage].append(work.seconds / swap.fraction)
    return {stage: fmean(values) for stage, values in samples.items()}


def _computed_ranges(layout: StageLayout, plan: Plan) -> list[range]:
    """Returns the blocks that forwards compute: the last of a route stops at its last checkpoint
    when it keeps nothing else (as ``simulate`` with ``stops_early``).
    """
    inputs = {
        instruction.stage
        for program in plan.programs
        for instruction in program
        if isinstance(instruction, Forward) and instruction.keep is Keep.INPUT
    }
    ranges = []
    for index, stage in enumerate(layout.forward):
        needed = stage.blocks
        if index in inputs and layout.is_last_forward(index):
            needed = layout.blocks_for_checkpoints(index)
        ranges.append(needed)
    return ranges


def _shared(seconds: Mapping[int, float], ranges: Sequence[range]) -> dict[int, float]:
    """Returns even shares by block; means where several routes have the block."""
    samples: dict[int, list[float]] = defaultdict(list)
    for stage, value in seconds.items():
        for block in ranges[stage]:
            samples[block].append(value / len(ranges[stage]))
    return {block: fmean(values) for block, values in samples.items()}


def _with_drops(blocks: Sequence[BlockCost], plan: Plan) -> tuple[BlockCost, ...]:
    """Returns blocks with one operator each that takes all the time of a RECOMPUTE after
    ``keep=selective``: it makes what was dropped.
    """
    dropped: dict[int, str] = {}
    stages: tuple[StageRange, ...] = plan.forward_stages
    for program in plan.programs:
        for instruction in program:
            if isinstance(instruction, Forward) and instruction.drop:
                for block in stages[instruction.stage].blocks:
                    dropped[block] = instruction.drop[0]
    return tuple(
        replace(
            cost,
            operators=(
                OperatorCost(name=dropped[block], forward_s=cost.recompute_s, activation_bytes=0.0),
            ),
        )
        if block in dropped
        else cost
        for block, cost in enumerate(blocks)
    )
