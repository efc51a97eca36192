"""Fills the time in which devices wait: runs later instructions of an order ahead of their turn.

In a simulation every device decides which instruction it runs next (:mod:`.dispatcher`). The first
instruction of its order that is left runs as soon as its inputs have come. While it waits, a
*filler* may run: a later instruction of a movable kind with its inputs present. So only the place
of fillers changes. All other instructions, and fillers of the same stage among themselves, keep
their order.

Two passes use it: :mod:`penstock.planner.passes.mario` moves forwards and recomputations,
:mod:`penstock.planner.passes.two_bp` weight gradients. Times are those of
:mod:`penstock.planner.schedule.timing`: compute, and one latency per hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le

from penstock.planner.passes.base import PassContext
from penstock.planner.passes.dispatcher import (
    BACKWARDS,
    Board,
    Dispatched,
    Dispatcher,
    FillPolicy,
    is_less,
)
from penstock.planner.schedule.layout import Order, OrderedInstruction
from penstock.planner.schedule.memory_order import OrderMemory, peak_bytes
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import OrderTimes, order_times
from penstock.protocol.plan.instructions import BackwardWeight, Forward, Recompute

__all__ = ["fill_waits", "is_less", "makespan_s"]


def makespan_s(schedule: Schedule, context: PassContext) -> float:
    """Returns the seconds until the last instruction of a schedule ends."""
    return _times(schedule, context).makespan_s


def _times(schedule: Schedule, context: PassContext) -> OrderTimes:
    return order_times(schedule.layout, schedule.orders, context.costs, hop_s=context.hop_s)


def fill_waits(
    schedule: Schedule,
    context: PassContext,
    movable: tuple[type[OrderedInstruction], ...],
    *,
    eager: bool = False,
) -> Schedule:
    """Returns the shortest of the schedules that each :class:`~.dispatcher.FillPolicy` makes,
    repeated while that helps.

    Returns the same schedule if none is shorter, or if shorter ones need more memory than the
    context's limit (and than the given one).

    ``movable``: FORWARD, RECOMPUTE or BACKWARD_WEIGHT. Forwards that move keep no graph, so that
    preposing them costs a checkpoint only. Recomputations move ahead of forwards, never of another
    backward or recomputation, so that one micro-batch's activations exist at a time. ``eager``:
    waits are also filled if the schedule becomes no longer.
    """
    times = _times(schedule, context)
    best_s, latest_s = times.makespan_s, times.starts
    board = Board.of(schedule.layout, schedule.orders, context, movable)
    while True:
        better = _best(board, latest_s, schedule, context)
        shorter = better is not None and is_less(better.makespan_s, best_s)
        if better is not None and (shorter or (eager and not is_less(best_s, better.makespan_s))):
            board = board.permuted(better)
            schedule = replace(schedule, orders=board.orders)
            best_s, latest_s = better.makespan_s, better.starts_s
        if not shorter:
            return schedule


def _best(
    board: Board, latest_s: Sequence[Sequence[float]], schedule: Schedule, context: PassContext
) -> Dispatched | None:
    """Returns the shortest of all fillings that memory allows, if memory allows any."""

    def run(filling: FillPolicy) -> Dispatched:
        return Dispatcher(board, latest_s, filling, _memories(schedule, context)).run()

    runs = [run(FillPolicy.ALWAYS)]
    if runs[0].moved:  # else there is nothing to fill a wait with, however strictly
        runs += [run(FillPolicy.IF_KNOWN), run(FillPolicy.IN_GAPS)]
    if context.memory_limit_bytes is not None:
        before = _peaks(schedule, context, schedule.orders)
        allowed = [max(context.memory_limit_bytes, peak) for peak in before]
        runs = [
            run
            for run in runs
            if all(map(le, _peaks(schedule, context, board.permuted(run).orders), allowed))
        ]
    return min(runs, key=lambda run: run.makespan_s, default=None)


def _peaks(schedule: Schedule, context: PassContext, orders: Sequence[Order]) -> tuple[float, ...]:
    return peak_bytes(schedule.layout, schedule.residency, context.costs, orders)


@dataclass(slots=True, kw_only=True)
class _LimitedMemory:
    """The memory of a device. ``graph_bytes``: what a recomputation makes at most.

    ``recomputed``: a recomputation waits for its backward.
    """

    memory: OrderMemory
    limit_bytes: float
    graph_bytes: float
    recomputed: bool = False

    def admits(self, filler: OrderedInstruction) -> bool:
        """Admits a forward ahead of its turn only if it leaves room for the next recomputation."""
        if isinstance(filler, BackwardWeight):
            return True
        needed_bytes = self.memory.needed_bytes(filler)
        if isinstance(filler, Forward) and not self.recomputed:
            needed_bytes += self.graph_bytes
        return needed_bytes <= self.limit_bytes

    def apply(self, instruction: OrderedInstruction) -> None:
        """Counts what an instruction makes and frees."""
        self.memory.apply(instruction)
        if isinstance(instruction, BACKWARDS):
            self.recomputed = isinstance(instruction, Recompute)


def _memories(schedule: Schedule, context: PassContext) -> list[_LimitedMemory]:
    """Returns the memory of each device; nothing where memory is no limit."""
    if context.memory_limit_bytes is None:
        return []
    memories: list[_LimitedMemory] = []
    for device in range(schedule.layout.num_devices):
        stages = [schedule.layout.backward[b] for b in schedule.layout.backward_stages_on(device)]
        graphs = (context.costs.of(stage.blocks).activation_bytes for stage in stages)
        memory = OrderMemory.of(schedule.layout, schedule.residency, context.costs, device)
        memories.append(
            _LimitedMemory(
                memory=memory,
                limit_bytes=context.memory_limit_bytes,
                graph_bytes=max(graphs, default=0.0),
            )
        )
    return memories
