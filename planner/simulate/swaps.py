"""Activations that leave a device for a while: to the host, or to another device's memory."""

from __future__ import annotations

import numpy as np

from penstock.planner.simulate.columns import Ints
from penstock.planner.simulate.context import Context, lookup
from penstock.planner.simulate.lanes import Lane
from penstock.protocol.instructions import Backward, BackwardInput, Recompute, SwapIn, SwapOut


def add_swaps(context: Context) -> None:
    """Swaps use the copy streams of their device, or the links to and from their peer."""
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
    """Queue and route."""
    queues, network = context.queues, context.network
    ends = (device, swap.peer) if isinstance(swap, SwapOut) else (swap.peer, device)
    if swap.peer is not None:
        out = isinstance(swap, SwapOut)
        return queues.peer_swap(device, out=out), network.link(*ends)
    if isinstance(swap, SwapOut):
        return queues.offload(device), network.offload(device)
    return queues.fetch(device), network.fetch(device)


def _bytes(context: Context, swap: SwapOut | SwapIn) -> float:
    """``fraction`` of what the forward kept."""
    cost = context.forward(swap.stage)
    dropped = cost.drop_bytes(context.drops.get((swap.stage, swap.micro_batch), ()))
    return swap.fraction * (cost.activation_bytes - dropped)


def _add_users(context: Context, tasks: Ints, rows: Ints) -> None:
    """The recomputation and the backward of what comes back wait for it."""
    columns = context.columns
    back = columns.rows(SwapIn)
    arriving = tasks[np.searchsorted(rows, back)]
    wanted = context.pairs(back)
    for kind in (Recompute, Backward, BackwardInput):
        users = columns.rows(kind)
        numbers = np.searchsorted(columns.computes, users)
        found = lookup(context.pairs(users), numbers, wanted, context.num_pairs)
        later = (found >= 0) & (columns.computes[found] > back)
        context.builder.need(found[later], arriving[later])
