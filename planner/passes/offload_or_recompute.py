"""Keep or swap: activations that devices cannot keep are swapped to the host, or made again.

The pass is ours, for coupled forward and backward stages. Obscura's integer program
(:mod:`.obscura`) swaps some micro-batches of 1F1B. This pass takes every order as it is, and
follows Belady's rule of paging. The activation with the furthest backward goes first, and comes
back as early as a copy takes. Activations that are cheap to make again are not copied. The choice
of dropped operators keeps both compute and the copies short, within the host's memory. One choice
holds for all stages, or every other stage of each device drops one operator more: devices stay
equally busy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf

from penstock.host.errors import ConfigError
from penstock.host.sums import added
from penstock.planner.cost.costs import BlockCost
from penstock.planner.memory.footprint import footprints
from penstock.planner.passes.activation_budget import (
    operators_by_worth,
    require_operators,
    with_drops,
)
from penstock.planner.passes.base import Pass, PassContext
from penstock.planner.schedule.layout import ComputeInstruction, Order, OrderedInstruction
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Recompute,
    SwapIn,
    SwapOut,
)

STATE_BYTES = 20.0
"""Host memory of a parameter's state: two slots of 16-bit weights and of gradients, and an fp32
master with two moments.
"""

_SLACK = 2
"""Activations for which room is left while they are on their way out."""

_TRIES = 6
"""Number of times that the room for activations is narrowed on a device over the limit."""


def keep_or_swap(schedule: Schedule, context: PassContext) -> Schedule:
    """Drops the operators that are cheapest to make again, swaps what then does not fit.

    Each choice drops one operator more; steps halfway lie between two choices. Choices are
    compared by the longest compute or copies of a device. The first that fits is taken.

    Raises:
        ConfigError: stages are not coupled, costs name no operators, activations are swapped
            already, or nothing fits the memory of devices and hosts.
    """
    require_operators(schedule, context, "keep-or-swap")
    worth = operators_by_worth(context.costs.of(range(schedule.layout.num_blocks)))
    sets = [frozenset(worth[kept:]) for kept in range(len(worth), -1, -1)]
    second = _every_other_stage(schedule)
    pairs = [(sets[0], sets[0])]
    for fewer, more in pairwise(sets):
        pairs += [(fewer, more)] * any(second) + [(more, more)]
    choices = [
        with_drops(schedule, [more if other else fewer for other in second])
        for fewer, more in pairs
    ]
    rooms = _rooms(choices[-1], context)
    compared = [(_longest_s(choice, rooms, context), index) for index, choice in enumerate(choices)]
    for longest_s, index in sorted(compared):
        if longest_s < inf:
            made = _fitting(choices[index], rooms, context)
            if made is not None:
                return made
    raise ConfigError(
        f"passes: keep-or-swap: {schedule.scheme} fits neither the devices nor the hosts; use more"
        " stages, smaller micro-batches, or a scheme with recompute full"
    )


def _every_other_stage(schedule: Schedule) -> list[bool]:
    """Returns of each forward stage whether it is the second, fourth, … of its device."""
    counts = Counter[int]()
    second = []
    for stage in schedule.layout.forward:
        counts[stage.device] += 1
        second.append(counts[stage.device] % 2 == 0)
    return second


def _rooms(schedule: Schedule, context: PassContext) -> list[float]:
    """Returns the bytes that each device has for activations, less the most of all other uses."""
    return [
        context.device_limit_bytes
        - max(t - a for t, a in zip(one.total_bytes, one.activation_bytes, strict=True))
        for one in footprints(lower(schedule), context.costs)
    ]


def _longest_s(schedule: Schedule, rooms: Sequence[float], context: PassContext) -> float:
    """Returns the longest seconds of compute, or of copies one way, of a device; ``inf`` where not
    even what is at work fits.
    """
    placed = _place_all(schedule, rooms, context)
    return max((one.longest_s for one in placed), default=inf)


def _place_all(
    schedule: Schedule, rooms: Sequence[float], context: PassContext
) -> tuple[_Placed, ...]:
    """Returns all devices' orders with swaps; none where one does not fit."""
    placed = []
    for device, order in enumerate(schedule.orders):
        one = _place(schedule, device, order, rooms[device], context)
        if one is None:
            return ()
        placed.append(one)
    return tuple(placed)


def _fitting(schedule: Schedule, rooms: Sequence[float], context: PassContext) -> Schedule | None:
    """Returns the schedule with swaps within the memory of devices and hosts, or None.

    The other bytes of a device are known only when swaps are placed. A device that is over the
    limit then gets less room for activations.
    """
    limit = context.device_limit_bytes
    for _ in range(_TRIES):
        placed = _place_all(schedule, rooms, context)
        if not placed or not _hosts_fit(context, [one.host_bytes for one in placed]):
            return None
        made = replace(schedule, orders=tuple(one.order for one in placed))
        peaks = footprints(lower(made), context.costs)
        over = [max(0.0, max(one.total_bytes) - limit) for one in peaks]
        if not any(over):
            return made
        rooms = [room - excess for room, excess in zip(rooms, over, strict=True)]
    return None


def _hosts_fit(context: PassContext, swapped: Sequence[float]) -> bool:
    """Returns whether hosts have room for the swaps of their devices and for the model's state."""
    cluster = context.cluster
    nodes = -(-len(swapped) // cluster.devices_per_node)
    parameters = added(block.parameters for block in context.costs.blocks)
    room = cluster.host_memory_bytes - STATE_BYTES * parameters / nodes
    return all(
        added(
            num_bytes for device, num_bytes in enumerate(swapped) if cluster.node_of(device) == node
        )
        <= room
        for node in range(nodes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """An order with swaps; ``longest_s``: its compute, or its copies in the busier direction;
    ``host_bytes``: the most that is on the host.
    """

    order: Order
    longest_s: float
    host_bytes: float


_Graph = tuple[int, int]
"""Stage and micro-batch of what a forward keeps."""


@dataclass(slots=True, kw_only=True)
class _Pager:
    """Walks through an order with room for ``room`` bytes of kept activations.

    ``uses``: where each is needed; ``here``: what is on the device; ``away``: what is not.
    ``ahead``: so many compute instructions before it is needed a copy starts.
    """

    order: Order
    sizes: Mapping[int, float]
    uses: Mapping[_Graph, int]
    room: float
    ahead: int
    here: set[_Graph] = field(default_factory=set)
    away: set[_Graph] = field(default_factory=set)
    held_bytes: float = 0.0
    away_bytes: float = 0.0
    most_away_bytes: float = 0.0
    moved_bytes: float = 0.0

    def run(self) -> Iterator[OrderedInstruction]:
        """Yields the instructions, with swaps among them."""
        due = sorted(self.uses, key=self.uses.__getitem__)
        first = 0
        for position, instruction in enumerate(self.order):
            while first < len(due) and self.uses[due[first]] < position:
                first += 1
            for graph in due[first : first + self.ahead + _SLACK]:
                if graph in self.away and self.uses[graph] - position <= self.ahead:
                    yield from self._load(graph, position)
            yield instruction
            if isinstance(instruction, Forward):
                kept = (instruction.stage, instruction.micro_batch)
                self._take(kept)
                yield from self._make_room(position, 0.0)
            elif isinstance(instruction, Backward | BackwardInput):
                self._let_go((instruction.stage, instruction.micro_batch))

    def _take(self, graph: _Graph) -> None:
        self.here.add(graph)
        self.held_bytes += self.sizes[graph[0]]

    def _let_go(self, graph: _Graph) -> None:
        if graph in self.here:
            self.here.remove(graph)
            self.held_bytes -= self.sizes[graph[0]]

    def _load(self, graph: _Graph, position: int) -> Iterator[OrderedInstruction]:
        yield from self._make_room(position, self.sizes[graph[0]])
        self.away.remove(graph)
        self.away_bytes -= self.sizes[graph[0]]
        self._take(graph)
        yield SwapIn(stage=graph[0], micro_batch=graph[1], fraction=1.0)

    def _make_room(self, position: int, needed: float) -> Iterator[OrderedInstruction]:
        while self.held_bytes + needed > self.room:
            furthest = max(self.here, key=self.uses.__getitem__, default=None)
            if furthest is None or self.uses[furthest] - position <= self.ahead:
                return
            self._let_go(furthest)
            self.away.add(furthest)
            self.moved_bytes += self.sizes[furthest[0]]
            self.away_bytes += self.sizes[furthest[0]]
            self.most_away_bytes = max(self.most_away_bytes, self.away_bytes)
            yield SwapOut(stage=furthest[0], micro_batch=furthest[1], fraction=1.0)


def _place(
    schedule: Schedule, device: int, order: Order, room: float, context: PassContext
) -> _Placed | None:
    """Returns a device's order with swaps, or None where not even what is at work fits."""
    layout, costs, cluster = schedule.layout, context.costs, context.cluster
    stages = {s: costs.of(layout.forward[s].blocks) for s in layout.forward_stages_on(device)}
    drops = {i.stage: i.drop for i in order if isinstance(i, Forward)}
    sizes = {s: cost.activation_bytes - cost.drop_bytes(drops[s]) for s, cost in stages.items()}
    uses: dict[_Graph, int] = {}
    for position, i in enumerate(order):
        if isinstance(i, Recompute | Backward | BackwardInput):
            uses.setdefault((i.stage, i.micro_batch), position)
    compute_s = added(
        _seconds(i, stages, drops) + costs.overhead_s(type(i))
        for i in order
        if isinstance(i, ComputeInstruction)
    )
    bandwidth = min(cluster.fetch_bandwidth, cluster.offload_bandwidth)
    largest = max(sizes.values(), default=0.0)
    copy_s, each_s = largest / bandwidth, compute_s / max(len(order), 1)
    room -= _SLACK * largest
    if room < largest:
        return None
    pager = _Pager(
        order=order,
        sizes=sizes,
        uses=uses,
        room=room,
        ahead=ceil(2.0 * copy_s / each_s) + 1 if each_s > 0.0 else 1,
    )
    with_swaps = tuple(pager.run())
    return _Placed(
        order=with_swaps,
        longest_s=max(compute_s, pager.moved_bytes / bandwidth),
        host_bytes=pager.most_away_bytes,
    )


def _seconds(
    instruction: ComputeInstruction,
    stages: Mapping[int, BlockCost],
    drops: Mapping[int, tuple[str, ...]],
) -> float:
    cost = stages[instruction.stage]
    if isinstance(instruction, Recompute):
        return cost.drop_seconds(drops[instruction.stage])
    return cost.seconds_of(type(instruction))


PASSES = (
    Pass(
        name="keep-or-swap",
        summary="recompute what is cheap to make again, swap what does not fit (ours)",
        run=keep_or_swap,
    ),
)
