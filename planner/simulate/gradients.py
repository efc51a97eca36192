"""Gradients on their way to the host: sums over replicas, offloads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from penstock.planner.simulate.columns import Ints
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.graph import Label
from penstock.planner.simulate.transfers import add_ring
from penstock.protocol.plan.instructions import (
    OffloadGradients,
    ReduceGradients,
)
from penstock.protocol.plan.resources import StateKind
from penstock.protocol.plan.semantics import Lane, takers

Reduced = Mapping[int, Ints]
"""The tasks after which the gradients of a publishing backward stage are summed, by stage."""

Offloads = Mapping[tuple[int, int], int]
"""The task after which gradients are on the host, by row of an OFFLOAD_GRADIENTS and block."""


def add_reductions(context: Context) -> Reduced:
    """Adds the sums of groups: backward stages of the same blocks. The root of a group publishes
    the sum (:mod:`penstock.protocol.plan.reduction`).

    The others send theirs to the root; with ``shards_weights`` all take part in a ring
    reduce-scatter. Then a ring all-reduce follows between the replicas of the whole plan.
    """
    rows = context.columns.rows(ReduceGradients)
    members: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(context.columns.stages[rows].tolist()):
        members[context.reduction.roots[stage]].append(index)
    return {root: _reduce(context, rows[group], root) for root, group in members.items()}


def _reduce(context: Context, rows: Ints, root: int) -> Ints:
    """Adds the sum of one group; returns the tasks after which it is there."""
    done = context.columns.issued_after(rows)
    num_bytes = context.backward(root).gradient_bytes
    if context.plan.shards_weights and len(rows) > 1:
        amount = (len(rows) - 1) / len(rows) * num_bytes
        ring = add_ring(context, rows=rows, needs=done, amount=amount, label=Label.INSTRUCTION)
        done = np.array([ring])
    elif len(rows) > 1:
        done = _send(context, rows, done, root)
    replicas = context.cluster.replicas
    if replicas == 1:
        return done
    rounds = 1 if context.plan.shards_weights else 2
    device = context.layout.backward[root].device
    tasks = context.builder.add(
        1,
        lane=Lane.REDUCE,
        queues=context.queues.collective(device),
        origins=rows[context.columns.stages[rows] == root],
        places=device,
        amounts=rounds * (replicas - 1) / replicas * num_bytes,
        routes=context.network.replicas(device),
        delays=context.cluster.latency_s,
    )
    context.builder.need(np.repeat(tasks, len(done)), done)
    return tasks


def _send(context: Context, rows: Ints, done: Ints, root: int) -> Ints:
    """Sends sums to the root as they are accumulated; returns their tasks, and what the root's own
    wait for.
    """
    sends = context.columns.stages[rows] != root
    sources = context.columns.devices[rows[sends]]
    target = context.layout.backward[root].device
    tasks = context.builder.add(
        len(sources),
        lane=Lane.REDUCE,
        queues=context.queues.link(sources, target),
        origins=rows[sends],
        places=sources,
        peers=target,
        amounts=context.backward(root).device_gradient_bytes,
        routes=[context.network.link(source, target) for source in sources.tolist()],
        delays=context.cluster.latency_s,
    )
    context.builder.need(tasks, done[sends])
    return np.concatenate((tasks, done[~sends]))


def add_offloads(context: Context, reduced: Reduced, *, by_block: bool) -> Offloads:
    """Adds copies of every OFFLOAD_GRADIENTS that publishes; those of other stages do nothing.

    ``by_block``: block after block, as our workers do it; otherwise a stage is one copy. Where
    devices share the host's cores, a copy that waits for no other device is one of the instructions
    that a device computes.
    """
    columns, queues = context.columns, context.queues
    rows = columns.rows(OffloadGradients)
    stages = columns.stages[rows].tolist()
    publishes = np.array([context.reduction.publishes(stage) for stage in stages], dtype=np.bool_)
    rows = rows[publishes]
    copies = [
        (row, blocks)
        for row in rows.tolist()
        for blocks in _copied(context.layout.backward[int(columns.stages[row])].blocks, by_block)
    ]
    origins = np.array([row for row, _ in copies], dtype=np.int64)
    devices, stages = columns.devices[origins], columns.stages[origins].tolist()
    computed = context.cluster.shares_cores and not reduced
    tasks = context.builder.add(
        len(copies),
        lane=Lane.OFFLOAD,
        queues=queues.compute(devices) if computed else queues.offload(devices),
        origins=origins,
        places=devices,
        amounts=[context.costs.of(blocks).gradient_bytes for _, blocks in copies],
        routes=[context.network.offload(device) for device in devices.tolist()],
    )
    context.issue(tasks, origins)
    for task, stage in zip(tasks.tolist(), stages, strict=True):
        if stage in reduced:
            context.builder.need(task, reduced[stage])
    lasts = dict(zip(origins.tolist(), tasks.tolist(), strict=True))
    _await_former(context, np.array([lasts[row] for row in rows.tolist()], dtype=np.int64), rows)
    return {
        (row, block): task
        for (row, blocks), task in zip(copies, tasks.tolist(), strict=True)
        for block in blocks
    }


def _copied(blocks: range, by_block: bool) -> list[range]:
    """Returns the ranges of blocks that are copied in one go."""
    return [range(block, block + 1) for block in blocks] if by_block else [blocks]


def _await_former(context: Context, offloads: Ints, rows: Ints) -> None:
    """Lets a device hold the sums of one leaving stage, as
    :mod:`penstock.planner.memory.allocation_ledger` counts them. The first backward of a stage
    waits for all offloads before it but the last.
    """
    columns = context.columns
    backwards = columns.rows(*takers(StateKind.GRAPH))
    firsts = backwards[np.unique(columns.stages[backwards], return_index=True)[1]]
    first_rows = np.searchsorted(rows, columns.starts[columns.devices[firsts]])
    awaited = np.searchsorted(rows, firsts) - 2
    waits = awaited >= first_rows
    if waits.any() and context.costs.separate_memory:
        tasks = np.searchsorted(columns.computes, firsts[waits])
        context.builder.need(tasks, offloads[awaited[waits]])
