"""Compute instructions as tasks of their devices' compute streams.

Activations that leave a device for a while: to the host, or to another device's memory.
"""

from __future__ import annotations

import numpy as np

from penstock.planner.schedule.timing import stage_seconds
from penstock.planner.simulate.columns import CODES, Ints
from penstock.planner.simulate.context import Context, lookup
from penstock.planner.simulate.graph import Floats
from penstock.protocol.plan.instructions import (
    BackwardWeight,
    Forward,
    Keep,
    Recompute,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.resources import StateKind
from penstock.protocol.plan.semantics import Lane, takers

_USERS = {*takers(StateKind.GRAPH), *takers(StateKind.PARTIAL_GRAPH)}
"""Instructions that need back what was swapped out."""


def add_compute(context: Context, *, stops_early: bool) -> None:
    """Adds the first tasks of the graph: task i is row ``columns.computes[i]``."""
    columns = context.columns
    devices = columns.devices[columns.computes]
    context.builder.add(
        len(columns.computes),
        lane=Lane.COMPUTE,
        queues=context.queues.compute(devices),
        origins=columns.computes,
        places=devices,
        seconds=_seconds(context, stops_early),
    )
    context.builder.num_compute = len(columns.computes)


def _seconds(context: Context, stops_early: bool) -> Floats:
    columns = context.columns
    seconds, overhead = np.zeros(len(columns.codes)), np.zeros(len(columns.codes))
    for kind, table in stage_seconds(context.layout, context.costs).items():
        rows = columns.rows(kind)
        seconds[rows] = np.array(table)[columns.stages[rows]]
        overhead[rows] = context.costs.overhead_s(kind)
    weights = columns.rows(BackwardWeight)
    seconds[weights] *= columns.map(weights, lambda work: len(work.micro_batches))
    if context.facts.drops:
        _make_dropped_again(context, seconds)
    if stops_early:
        _stop_at_last_checkpoint(context, seconds)
    return seconds[columns.computes] + overhead[columns.computes]


def _make_dropped_again(context: Context, seconds: Floats) -> None:
    """Shortens recomputations after ``keep=selective``, which make only what was dropped."""
    cache: dict[tuple[int, tuple[str, ...]], float] = {}
    rows = context.columns.rows(Recompute)
    for row, work in zip(rows.tolist(), context.columns.at(rows), strict=True):
        drop = context.facts.drops.get((work.stage, work.micro_batch))
        if drop is not None:
            if (work.stage, drop) not in cache:
                cache[work.stage, drop] = context.backward(work.stage).drop_seconds(drop)
            seconds[row] = cache[work.stage, drop]


def _stop_at_last_checkpoint(context: Context, seconds: Floats) -> None:
    """Shortens forwards of last stages with ``keep=input``: they leave only checkpoints."""
    layout, columns = context.layout, context.columns
    for stage in range(len(layout.forward)):
        if not layout.is_last_forward(stage):
            continue
        rows = np.flatnonzero((columns.codes == CODES[Forward]) & (columns.stages == stage))
        partial = columns.map(rows, lambda forward: forward.keep is Keep.INPUT) > 0
        seconds[rows[partial]] = context.costs.of(layout.blocks_for_checkpoints(stage)).forward_s


def add_swaps(context: Context) -> None:
    """Adds swaps, on the copy streams of their device or the links to and from their peer."""
    columns, builder = context.columns, context.builder
    rows = columns.rows(SwapOut, SwapIn)
    if not len(rows):
        return
    devices = columns.devices[rows].tolist()
    swaps = list(columns.at(rows))
    ways = [_way(context, swap, device) for swap, device in zip(swaps, devices, strict=True)]
    tasks = builder.add(
        len(rows),
        lane=Lane.SWAP,
        queues=[queue for queue, _ in ways],
        origins=rows,
        places=devices,
        peers=[-1 if swap.peer is None else swap.peer for swap in swaps],
        amounts=[_bytes(context, swap) for swap in swaps],
        routes=[route for _, route in ways],
        delays=[0.0 if swap.peer is None else context.cluster.latency_s for swap in swaps],
    )
    context.issue(tasks, rows)
    out: dict[tuple[object, ...], int] = {}
    for device, swap, task in zip(devices, swaps, tasks.tolist(), strict=True):
        fields = (device, swap.stage, swap.micro_batch, swap.fraction, swap.peer)
        if isinstance(swap, SwapOut):
            out[fields] = task
        else:
            builder.need(np.array([task]), np.array([out.get(fields, -1)]))
    _add_users(context, tasks, rows)


def _way(context: Context, swap: SwapOut | SwapIn, device: int) -> tuple[int, int]:
    """Returns the queue and the route of a swap."""
    queues, network = context.queues, context.network
    ends = (device, swap.peer) if isinstance(swap, SwapOut) else (swap.peer, device)
    if swap.peer is not None:
        out = isinstance(swap, SwapOut)
        return queues.peer_swap(device, out=out), network.link(*ends)
    if isinstance(swap, SwapOut):
        return queues.offload(device), network.offload(device)
    return queues.fetch(device), network.fetch(device)


def _bytes(context: Context, swap: SwapOut | SwapIn) -> float:
    """Returns the bytes that a swap moves: ``fraction`` of what the forward kept."""
    cost = context.forward(swap.stage)
    dropped = cost.drop_bytes(context.facts.drops.get((swap.stage, swap.micro_batch), ()))
    return swap.fraction * (cost.activation_bytes - dropped)


def _add_users(context: Context, tasks: Ints, rows: Ints) -> None:
    """Lets the recomputation and the backward of what comes back wait for it."""
    columns = context.columns
    back = columns.rows(SwapIn)
    arriving = tasks[np.searchsorted(rows, back)]
    backward_pairs = context.pairs(back)
    for kind in _USERS:
        users = columns.rows(kind)
        numbers = np.searchsorted(columns.computes, users)
        matches = lookup(context.pairs(users), numbers, backward_pairs, context.num_pairs)
        later = (matches >= 0) & (columns.computes[matches] > back)
        context.builder.need(matches[later], arriving[later])
