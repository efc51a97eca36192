"""Lower bounds of a candidate's seconds and bytes, known before it is planned. They make a search
short.

Both bounds are of compute alone. :meth:`Floors.seconds` knows only the places of stages. A device
cannot start before the first micro-batch has come to it. It computes its part of all of them, and
after its last backward the stages before it follow. :func:`ordered` knows the order of each device:
the simulator has the same order, and transfers on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from penstock.host.sums import added
from penstock.planner.cost.costs import BlockCost
from penstock.planner.planning.build import build_schedule
from penstock.planner.planning.pipeline import PlanContext
from penstock.planner.planning.search_space import Candidate
from penstock.planner.schedule.layout import Residency, partition
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import order_times
from penstock.planner.schemes import SCHEMES
from penstock.protocol.plan.instructions import BackwardInput

_SAME_STAGES = frozenset({"2bp", "mario", "keep-graphs", "keep-what-fits", "obscura"})
"""Passes that leave every stage where it is; other passes may not."""


@dataclass(slots=True, kw_only=True)
class _Load:
    """The load of one device, in seconds: all work, and of that the second halves of backwards. The
    heads and tails are the least work of other devices before and after it.
    """

    work_s: float = 0.0
    weights_s: float = 0.0
    heads_s: list[float] = field(default_factory=list)
    tails_s: list[tuple[float, float]] = field(default_factory=list)
    """Whole backwards of the stages before, and their first halves."""

    def least_s(self, splits: bool) -> float:
        """Returns the seconds from the beginning to the end of everything."""
        head_s = min(self.heads_s, default=0.0)
        whole_s = min((whole for whole, _ in self.tails_s), default=0.0)
        if not splits:
            return head_s + self.work_s + whole_s
        first_s = min((first for _, first in self.tails_s), default=0.0)
        return head_s + max(self.work_s, self.work_s - self.weights_s + first_s)


@dataclass(slots=True, kw_only=True)
class Floors:
    """Floors of candidates with micro-batches of one size; cuts into stages are remembered.

    ``splits``: by scheme, whether its orders split backwards; one that is not known yet might.
    """

    context: PlanContext
    splits: dict[str, bool] = field(default_factory=dict)
    _cuts: dict[int, list[BlockCost]] = field(default_factory=dict)

    def seconds(self, candidate: Candidate) -> float:
        """Returns seconds of compute that no order of a candidate's work can beat."""
        request, costs = candidate.request, self.context.prices.costs
        if not _SAME_STAGES.issuperset(request.passes):
            once = added(block.forward_s + block.backward_s for block in costs.blocks)
            return once * request.num_microbatches / request.num_devices
        splits = "2bp" in request.passes or self.splits.get(request.scheme, True)
        return max(device.least_s(splits) for device in self._devices(candidate))

    def device_bytes(self, candidate: Candidate) -> float:
        """Returns bytes that some device cannot do without where weights stay on devices: those of
        its stages, and what one backward needs of one micro-batch.
        """
        request, scheme = candidate.request, SCHEMES[candidate.request.scheme]
        resident = scheme.residency is Residency.RESIDENT and not scheme.shards_weights
        if not resident or request.drop or not _SAME_STAGES.issuperset(request.passes):
            return 0.0
        _, num_backward = candidate.stages
        placed = scheme.place(*candidate.stages, request.num_devices).backward
        stages = self._stages(num_backward)
        kept, graphs = [0.0] * request.num_devices, [0.0] * request.num_devices
        for number, device in enumerate(placed):
            stage = stages[number % num_backward]
            kept[device] += stage.weight_bytes + stage.device_gradient_bytes + stage.static_bytes
            graphs[device] = max(graphs[device], stage.activation_bytes)
        return max(one + other for one, other in zip(kept, graphs, strict=True))

    def _devices(self, candidate: Candidate) -> Sequence[_Load]:
        request, scheme = candidate.request, SCHEMES[candidate.request.scheme]
        num_devices, count = request.num_devices, request.num_microbatches
        num_forward, num_backward = candidate.stages
        placed = scheme.place(num_forward, num_backward, num_devices)
        shares = Counter(scheme.routes(count, num_devices)) or {0: count}
        devices = [_Load() for _ in range(num_devices)]
        fixed_s = self.context.prices.costs.instruction_s
        for route, share in shares.items():
            forward, backward = self._stages(num_forward), self._stages(num_backward)
            before = accumulate((stage.forward_s + fixed_s for stage in forward), initial=0.0)
            for number, (stage, head_s) in enumerate(zip(forward, before, strict=False)):
                device = devices[placed.forward[route * num_forward + number]]
                device.work_s += share * (stage.forward_s + fixed_s)
                device.heads_s.append(head_s)
            for number, (stage, tails_s) in enumerate(_with_tails(backward, fixed_s)):
                device = devices[placed.backward[route * num_backward + number]]
                device.work_s += share * (stage.backward_s + fixed_s)
                device.weights_s += share * stage.backward_weight_s
                device.tails_s.append(tails_s)
        return devices

    def _stages(self, number: int) -> list[BlockCost]:
        if number not in self._cuts:
            costs = self.context.prices.costs
            self._cuts[number] = [costs.of(cut) for cut in partition(self.context.work, number)]
        return self._cuts[number]


def _with_tails(
    stages: Sequence[BlockCost], fixed_s: float
) -> Iterator[tuple[BlockCost, tuple[float, float]]]:
    whole_s = first_s = 0.0
    for stage in stages:
        yield stage, (whole_s, first_s)
        whole_s += stage.backward_s + fixed_s
        first_s += stage.backward_input_s + fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Lower bounds by the order of a candidate without passes. ``splits``: splits backwards."""

    seconds: float
    device_bytes: float
    splits: bool


def ordered(candidate: Candidate, context: PlanContext) -> Ordered:
    """Returns lower bounds by the order of one replica.

    If forwards stop at their last checkpoint, a recomputed order may take less than its
    instructions say; its seconds are then 0. Bytes are 0 in two cases: streamed weights have
    buffers that only the plan knows, and the halves of split backwards overlap.

    Raises:
        ConfigError: an impossible combination.
    """
    schedule: Schedule = build_schedule(candidate.request, context.work)
    costs, layout = context.prices.costs, schedule.layout
    shortened = context.stops_early and candidate.request.recompute == "full"
    times_s = 0.0 if shortened else order_times(layout, schedule.orders, costs).makespan_s
    splits = any(isinstance(i, BackwardInput) for order in schedule.orders for i in order)
    counts = schedule.residency is Residency.RESIDENT and not splits
    peaks = peak_bytes(layout, schedule.residency, costs, schedule.orders) if counts else (0.0,)
    return Ordered(seconds=times_s, device_bytes=max(peaks), splits=splits)
