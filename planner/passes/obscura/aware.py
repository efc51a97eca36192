"""Swapping-aware recomputation of a schedule: its problem, and the solution applied (section 6).

Swaps go into the order of a stage in the three phases of the paper (section 6.1, figure 10).

*Eviction*, in the warm-up, keeps the number of blocks on the device at its target.
*Eviction-loading*, in the steady phase, evicts one block for every block that comes back.
*Loading*, in the end, only brings back.

The newest block is always evicted, as its backward is the furthest away. So blocks needed soon
stay, and few blocks have to move at all (Belady's rule). A block is on the device from its forward,
or from its SWAP_IN, until its backward or its SWAP_OUT has ended. The steady phase gives a SWAP_OUT
the time of a backward, and a SWAP_IN that of a whole round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from penstock.host.errors import ConfigError
from penstock.host.sums import added
from penstock.planner.cost.cluster import Cluster
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura.memory import Grain, fixed_bytes, order_memory
from penstock.planner.passes.obscura.recompute import (
    LOOKAHEAD,
    RecomputeProblem,
    RecomputeSolution,
    Source,
    StageProblem,
    StageTimes,
    SwapStyle,
    best_solution,
    execution_times,
)
from penstock.planner.passes.obscura.shape import NONE, StageOrder, adjusted_stages, stage_orders
from penstock.planner.schedule.layout import Order, OrderedInstruction
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes.base import Recomputation
from penstock.protocol.plan.instructions import Backward, Forward, SwapIn, SwapOut

_ROUNDING = 1e-9


def swap_aware_recompute(
    schedule: Schedule,
    context: PassContext,
    *,
    grain: Grain = Grain.STAGE,
    evictions: Sequence[int] | None = None,
) -> Schedule:
    """Drops and swaps in adjusted stages as the integer program says (Equation 4).

    ``evictions``: values of lambda_k to try, by default the paper's, 2 … p - k - 2. Where no set of
    operators fits the limit, the schedule stays as it is if full recomputation does.

    Raises:
        ConfigError: nothing fits the memory limit, or the schedule has no 1F1B shape.
    """
    adjusted, limit = adjusted_stages(schedule), context.memory_limit_bytes
    if not adjusted or limit is None:
        return schedule
    orders = stage_orders(schedule)
    if evictions is None:
        evictions = range(2, len(orders) - adjusted[-1] - 1)
    problem = recompute_problem(schedule, context, grain)
    solution = best_solution(problem, evictions)
    if solution is None:
        _require_full(schedule, context, orders, grain)
        return schedule
    return _apply(schedule, orders, problem, solution)


def recompute_problem(schedule: Schedule, context: PassContext, grain: Grain) -> RecomputeProblem:
    """Returns Equation 4 for a schedule with adjusted stages 0 … k, and a memory limit."""
    layout, costs = schedule.layout, context.costs
    orders = stage_orders(schedule)
    last = adjusted_stages(schedule)[-1]
    stages = [costs.of(stage.blocks) for stage in layout.forward[: last + 1]]
    sources = tuple(dict.fromkeys((s.operator, s.needed_by) for c in stages for s in c.sources))
    sizes = {op.name: op.activation_bytes for stage in stages for op in stage.operators}
    made = {source.operator for stage in stages for source in stage.sources}
    operators = tuple(sorted(name for name, size in sizes.items() if size > 0.0 or name in made))
    limit = context.memory_limit_bytes
    assert limit is not None
    times = execution_times(stage_times(schedule, context), layout.num_microbatches, last)
    return RecomputeProblem(
        operators=operators,
        sources=sources,
        stages=tuple(
            _stage_problem(order, schedule, context, operators, sources, last, grain)
            for order in orders[: last + 1]
        ),
        num_microbatches=layout.num_microbatches,
        following_s=times[last + 1] if last + 1 < len(times) else 0.0,
        limit_bytes=limit,
        host_bandwidth=_host_bandwidth(context.cluster),
        peer_bandwidth=(
            _host_bandwidth(context.cluster)
            if context.cluster.peer_through_host
            else context.cluster.peer_bandwidth
        ),
    )


def stage_times(schedule: Schedule, context: PassContext) -> tuple[StageTimes, ...]:
    """Returns the seconds of every stage, with the recomputation that its forwards ask for."""
    costs = context.costs
    stages: list[StageTimes] = []
    for order in stage_orders(schedule, swaps=True):
        cost = costs.of(schedule.layout.forward[order.stage].blocks)
        remake_s = 0.0
        if order.recompute.mode != "none":
            full = order.recompute.mode == "full"
            remake_s = cost.recompute_s if full else cost.drop_seconds(order.recompute.drop)
            remake_s += costs.instruction_s
        stages.append(
            StageTimes(
                forward_s=cost.forward_s + costs.overhead_s(Forward),
                backward_s=cost.backward_s + costs.overhead_s(Backward),
                recompute_s=remake_s,
            )
        )
    return tuple(stages)


def _stage_problem(
    order: StageOrder,
    schedule: Schedule,
    context: PassContext,
    operators: tuple[str, ...],
    sources: tuple[Source, ...],
    last: int,
    grain: Grain,
) -> StageProblem:
    layout, costs = schedule.layout, context.costs
    blocks = layout.forward[order.stage].blocks
    cost = costs.of(blocks)
    parts = [cost] if grain is Grain.STAGE else [costs.blocks[i] for i in blocks]
    peer = len(layout.forward) - 1 - order.stage
    room = None
    if peer > last:
        used = order_memory(layout, costs, stage_orders(schedule)[peer], grain)
        room = (context.memory_limit_bytes or 0.0) - used
    return StageProblem(
        forward_s=cost.forward_s + costs.overhead_s(Forward),
        backward_s=cost.backward_s + costs.overhead_s(Backward),
        operator_s=tuple(cost.drop_seconds((name,)) for name in operators),
        operator_bytes=tuple(cost.remade_bytes((name,)) for name in operators),
        source_bytes=tuple(
            added(s.num_bytes for s in cost.sources if (s.operator, s.needed_by) == source)
            for source in sources
        ),
        remade_bytes=tuple(
            {tuple(part.remade_bytes((name,)) for name in operators): None for part in parts}
        ),
        activation_bytes=cost.activation_bytes,
        fixed_bytes=fixed_bytes(costs, blocks),
        held=order.in_flight,
        peer=None if room is None else peer,
        peer_bytes=room or 0.0,
    )


def _host_bandwidth(cluster: Cluster) -> float:
    """Returns the bytes/s of one device while all that share its switch copy."""
    shared = cluster.switch_bandwidth / cluster.devices_per_switch
    return min(cluster.fetch_bandwidth, cluster.offload_bandwidth, shared)


def _apply(
    schedule: Schedule,
    orders: Sequence[StageOrder],
    problem: RecomputeProblem,
    solution: RecomputeSolution,
) -> Schedule:
    recompute = Recomputation(mode="selective", drop=solution.drop) if solution.drop else NONE

    def applied(order: StageOrder) -> Order:
        if order.stage > problem.last_adjusted:
            return order.instructions()
        rule = swap_rule(problem, solution, order.stage)
        return with_swaps(replace(order, recompute=recompute), rule)

    return replace(schedule, orders=tuple(map(applied, orders)))


def swap_rule(problem: RecomputeProblem, solution: RecomputeSolution, stage: int) -> SwapRule:
    """Returns what a solution means for the order of a stage."""
    at, swap = problem.stages[stage], solution.swap
    moved_s = (
        problem.kept_bytes(stage, solution.drop) * swap.fraction / problem.bandwidth(swap.style)
    )
    pace = ceil(moved_s / at.forward_s - _ROUNDING) if at.forward_s > 0.0 else 1
    return SwapRule(
        evicted=problem.evicted(stage, swap),
        fraction=swap.fraction,
        pace=max(pace, 1),
        peer=at.peer if swap.style is SwapStyle.PEER else None,
    )


def _require_full(
    schedule: Schedule, context: PassContext, orders: Sequence[StageOrder], grain: Grain
) -> None:
    limit = context.memory_limit_bytes or 0.0
    for order in orders:
        needed = order_memory(schedule.layout, context.costs, order, grain)
        if needed > limit:
            raise ConfigError(
                f"memory.device_limit = {limit:.0f}: stage {order.stage} needs {needed:.0f} bytes"
                " even if it recomputes; use more workers, smaller micro-batches, or a larger limit"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule:
    """The swaps of a stage.

    The stage evicts ``evicted`` blocks (lambda) in the warm-up, ``fraction`` (beta) of each, to the
    host or to device ``peer``. One transfer takes ``pace`` forwards, rounded up.
    """

    evicted: int
    fraction: float
    pace: int = 1
    peer: int | None = None


def with_swaps(order: StageOrder, rule: SwapRule) -> Order:
    """Returns the order with swaps, or as it is where nothing is to be evicted."""
    return tuple(_Placer(order, rule).run()) if rule.evicted else order.instructions()


@dataclass(slots=True)
class _Placer:
    """Walks through an order. ``here``: blocks wholly on the device; ``away``: evicted blocks."""

    order: StageOrder
    rule: SwapRule
    here: list[int] = field(default_factory=list)
    away: set[int] = field(default_factory=set)

    def run(self) -> Iterator[OrderedInstruction]:
        """Yields the instructions, with swaps among them."""
        stage, ahead = self.order.stage, self.order.ahead
        total, done = len(ahead), 0
        warmup = self._evicted_in_warmup()
        for m, count in enumerate(ahead):
            for forward in range(done, count):
                yield self.order.recompute.forward(stage, forward)
                self.here.append(forward)
                if forward in warmup:
                    yield self._evict(forward)
            done = count
            yield from self._make_room(m, more=done < total)
            yield from self.order.backward(m)
            self.here.remove(m)
            yield from self._load(m)

    def _evicted_in_warmup(self) -> frozenset[int]:
        """Returns the micro-batches that are evicted in the warm-up, as late as possible and as far
        apart as a transfer takes. So the last transfer ends before the last forward of the warm-up
        begins.
        """
        last, pace = self.order.warmup - 2, self.rule.pace
        return frozenset(last - pace * i for i in range(1, self.rule.evicted + 1))

    def _target(self) -> float:
        return self.order.warmup - self.rule.evicted * self.rule.fraction

    def _make_room(self, backward: int, *, more: bool) -> Iterator[SwapOut]:
        """Evicts until the next forward and the next block to load fit with the blocks that stay.

        Before this backward there are at most as many blocks as the target. After it there is room
        for one forward more, if there is one, and for blocks that are loaded meanwhile.
        """
        due = self.rule.fraction if self._due(backward) is not None else 0.0
        size = len(self.here) + len(self.away) * (1.0 - self.rule.fraction)
        surplus = size - 1.0 + (1.0 if more else 0.0) + due - self._target()
        while surplus > _ROUNDING and self.here[-1] > backward + 1 + LOOKAHEAD:
            yield self._evict(self.here[-1])
            surplus -= self.rule.fraction

    def _due(self, backward: int) -> int | None:
        ahead_of = backward + LOOKAHEAD
        return ahead_of if ahead_of in self.away else None

    def _load(self, backward: int) -> Iterator[SwapIn]:
        due = self._due(backward)
        if due is not None:
            self.away.remove(due)
            self.here.insert(0, due)
            self.here.sort()
            yield SwapIn(
                stage=self.order.stage,
                micro_batch=due,
                fraction=self.rule.fraction,
                peer=self.rule.peer,
            )

    def _evict(self, micro_batch: int) -> SwapOut:
        self.here.remove(micro_batch)
        self.away.add(micro_batch)
        return SwapOut(
            stage=self.order.stage,
            micro_batch=micro_batch,
            fraction=self.rule.fraction,
            peer=self.rule.peer,
        )
