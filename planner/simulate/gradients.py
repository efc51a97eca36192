"""Gradients on their way to the host: sums over replicas, offloads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from penstock.planner.simulate.columns import Ints
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.graph import Label
from penstock.planner.simulate.lanes import Lane
from penstock.planner.simulate.ring import add_ring
from penstock.protocol.instructions import OffloadGradients, ReduceGradients

Reduced = Mapping[tuple[int, int], int]
"""By device and backward stage, the task after which its gradients are summed."""


def add_reductions(context: Context) -> Reduced:
    """Backward stages of the same blocks that reduce are one group, in the order of programs.

    A ring all-reduce, or with ``shards_weights`` a reduce-scatter; then the same between the
    replicas of the whole plan.
    """
    rows = context.columns.rows(ReduceGradients)
    stages = context.columns.stages[rows].tolist()
    members: dict[range, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        members[context.layout.backward[stage].blocks].append(index)
    reduced: dict[tuple[int, int], int] = {}
    for group in members.values():
        tasks = _reduce(context, rows[group])
        devices = context.columns.devices[rows[group]].tolist()
        for device, index, task in zip(devices, group, tasks.tolist(), strict=True):
            reduced[device, stages[index]] = task
    return reduced


def _reduce(context: Context, rows: Ints) -> Ints:
    """The tasks after which the gradients of each member are summed."""
    columns, count = context.columns, len(rows)
    num_bytes = context.backward(int(columns.stages[rows[0]])).gradient_bytes
    rounds = 1 if context.plan.shards_weights else 2
    done = columns.issued_after(rows)
    if count > 1:
        amount = rounds * (count - 1) / count * num_bytes
        ring = add_ring(context, rows=rows, needs=done, amount=amount, label=Label.INSTRUCTION)
        done = np.full(count, ring)
    replicas = context.cluster.replicas
    if replicas == 1:
        return done
    devices = columns.devices[rows]
    tasks = context.builder.add(
        count,
        lane=Lane.REDUCE,
        queues=context.queues.collective(devices),
        origins=rows,
        places=devices,
        amounts=rounds * (replicas - 1) / replicas * num_bytes,
        routes=[context.network.replicas(device) for device in devices.tolist()],
        delays=context.cluster.latency_s,
    )
    context.builder.need(tasks, done)
    return tasks


def add_offloads(context: Context, reduced: Reduced) -> Mapping[int, int]:
    """Task of every OFFLOAD_GRADIENTS, by row; with ``shards_weights`` of the device's share."""
    columns = context.columns
    rows = columns.rows(OffloadGradients)
    devices, stages = columns.devices[rows], columns.stages[rows].tolist()
    share = 1.0 / context.plan.num_devices if context.plan.shards_weights else 1.0
    tasks = context.builder.add(
        len(rows),
        lane=Lane.OFFLOAD,
        queues=context.queues.offload(devices),
        origins=rows,
        places=devices,
        amounts=[share * context.backward(stage).gradient_bytes for stage in stages],
        routes=[context.network.offload(device) for device in devices.tolist()],
    )
    context.issue(tasks, rows)
    keys = zip(devices.tolist(), stages, strict=True)
    context.builder.need(tasks, np.array([reduced.get(key, -1) for key in keys], dtype=np.int64))
    return dict(zip(rows.tolist(), tasks.tolist(), strict=True))
