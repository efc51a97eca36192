"""Optimizer work: on the cores of nodes, and updates on devices.

A **unit** is what a node does in one go: blocks whose gradients come from the same backward stages,
so usually one backward stage. One optimizer owns a block (the node of the first route's backward)
and sums what other routes contribute, which other nodes send it. Where gradients are reduced, each
node has the sum and updates its own copy of the weights; where weights are sharded, its shares.

An UPDATE takes a block from its unit: its state is fetched when the instruction is issued, its
kernel runs on the compute stream when the state is there and nothing else can run, and its weights
go back when the kernel is over. Its bytes are those of a pass that reads the gradients from device
memory; on another device than the one that made them they are fetched as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf
from typing import Any

import numpy as np

from penstock.planner.cluster import OptimizerModel, OptimizerStart
from penstock.planner.simulate.columns import Ints
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.gradients import Reduced
from penstock.planner.simulate.graph import Label
from penstock.planner.simulate.lanes import Lane
from penstock.protocol.instructions import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """``rows`` of the offloads that bring gradients; ``share`` of the parameters that the node has
    to do.
    """

    node: int
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    share: float


def add_optimizer(
    context: Context, offloads: Mapping[int, int], reduced: Reduced, optimizer: OptimizerModel
) -> None:
    """Work of all nodes and devices that follows the offloads (tasks by row)."""
    if not offloads:
        return
    flush = -1
    if optimizer.start is OptimizerStart.FLUSH:
        flush = context.barrier(np.array(list(offloads.values())), min(offloads))
    units = _units(context, offloads, reduced)
    settled = _add_settles(context, units, optimizer)
    arrived = _arrivals(context, units, offloads)
    updated = _add_updates(context, offloads, settled, flush)
    for unit in units:
        parameters = _parameters(context, unit, updated)
        if parameters > 0.0 or not updated.intersection(unit.blocks):
            tasks = _add_pass(context, unit, parameters, optimizer.tail_bytes, Label.OPTIMIZER)
            needs = [arrived[unit.node, row] for row in unit.rows]
            needs += [flush, settled.get(unit.blocks[0], -1)]
            context.builder.need(tasks, np.array(needs))


def _units(context: Context, offloads: Mapping[int, int], reduced: Reduced) -> list[_Unit]:
    """Last stage first: where gradients arrive at the same time, that is the order of work."""
    columns, plan, cluster = context.columns, context.plan, context.cluster
    rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in sorted(offloads, key=lambda row: int(columns.stages[row])):
        device, stage = int(columns.devices[row]), int(columns.stages[row])
        for block in context.layout.backward[stage].blocks:
            summed = (device, stage) in reduced or plan.shards_weights
            owner = device if summed else plan.owner_device(block)
            rows_of[cluster.node_of(owner), block].append(row)
    grouped: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for (node, block), rows in rows_of.items():
        grouped[node, tuple(rows)].append(block)
    units = [
        _Unit(
            node=node,
            blocks=tuple(blocks),
            rows=rows,
            share=len(rows) / plan.num_devices if plan.shards_weights else 1.0,
        )
        for (node, rows), blocks in grouped.items()
    ]
    return sorted(units, key=lambda unit: int(columns.stages[unit.rows[0]]), reverse=True)


def _parameters(context: Context, unit: _Unit, without: frozenset[int] = frozenset()) -> float:
    blocks = context.costs.blocks
    return unit.share * sum(blocks[b].parameters for b in unit.blocks if b not in without)


def _add_pass(
    context: Context, unit: _Unit, parameters: float, bytes_each: float, label: Label
) -> Ints:
    """A pass of a node's cores; without limit of DRAM it takes the time of the cores."""
    cluster = context.cluster
    seconds, amount, route = parameters / cluster.optimizer_rate, 0.0, -1
    if bytes_each > 0.0 and not isinf(cluster.dram_bandwidth):
        seconds, amount = 0.0, parameters * bytes_each
        route = context.network.optimizer(unit.node, cluster.optimizer_rate * bytes_each)
    return context.builder.add(
        1,
        lane=Lane.OPTIMIZER,
        queues=context.queues.optimizer(unit.node),
        origins=unit.rows[0],
        places=unit.node,
        label=label,
        seconds=seconds,
        amounts=amount,
        routes=route,
        unordered=True,
    )


def _add_settles(
    context: Context, units: list[_Unit], optimizer: OptimizerModel
) -> Mapping[int, int]:
    """Settle the previous attempt from the start on; by block, the task that does it."""
    settled: dict[int, int] = {}
    if optimizer.settle_bytes > 0.0:
        for unit in units:
            parameters = _parameters(context, unit)
            task = _add_pass(context, unit, parameters, optimizer.settle_bytes, Label.SETTLE)
            settled.update(dict.fromkeys(unit.blocks, int(task[0])))
    return settled


def _arrivals(
    context: Context, units: list[_Unit], offloads: Mapping[int, int]
) -> Mapping[tuple[int, int], int]:
    """By (node, row of an offload), the task after which the gradients are in the node's memory."""
    arrived: dict[tuple[int, int], int] = {}
    for unit in units:
        for row in unit.rows:
            source = context.cluster.node_of(int(context.columns.devices[row]))
            if source == unit.node:
                arrived[unit.node, row] = offloads[row]
            elif (unit.node, row) not in arrived:
                arrived[unit.node, row] = _add_pull(context, row, source, unit, offloads[row])
    return arrived


def _add_pull(context: Context, row: int, source: int, unit: _Unit, offload: int) -> int:
    """A unit's part of what another node offloaded."""
    stage = int(context.columns.stages[row])
    device = int(context.columns.devices[row])
    task = context.builder.add(
        1,
        lane=Lane.REDUCE,
        queues=context.queues.collective(device),
        origins=row,
        places=device,
        amounts=context.backward(stage).gradient_bytes,
        routes=context.network.nodes(source, unit.node),
        delays=context.cluster.latency_s,
        unordered=True,
    )
    context.builder.need(task, offload)
    return int(task[0])


def _add_updates(
    context: Context, offloads: Mapping[int, int], settled: Mapping[int, int], flush: int
) -> frozenset[int]:
    """Fetch, kernel and offload of every UPDATE; returns their blocks."""
    columns, cluster, builder = context.columns, context.cluster, context.builder
    rows = columns.rows(Update)
    if not len(rows):
        return frozenset()
    devices, updated = columns.devices[rows], columns.stages[rows].tolist()
    parameters = np.array([context.costs.blocks[block].parameters for block in updated])
    gradients, needs = _elsewhere(context, rows, offloads)
    common: dict[str, Any] = {"origins": rows, "places": devices}
    fetches = builder.add(
        len(rows),
        lane=Lane.FETCH,
        queues=context.queues.fetch(devices),
        amounts=parameters * cluster.update_fetch_bytes + gradients,
        routes=[context.network.fetch(device) for device in devices.tolist()],
        **common,
    )
    kernels = builder.add(
        len(rows),
        lane=Lane.UPDATE,
        queues=context.queues.compute(devices),
        seconds=parameters / cluster.device_optimizer_rate,
        unordered=True,
        **common,
    )
    stores = builder.add(
        len(rows),
        lane=Lane.OFFLOAD,
        queues=context.queues.offload(devices),
        amounts=parameters * cluster.update_offload_bytes,
        routes=[context.network.offload(device) for device in devices.tolist()],
        unordered=True,
        **common,
    )
    context.issue(fetches, rows)
    builder.need(fetches, needs)
    builder.need(fetches, flush)
    builder.need(fetches, np.array([settled.get(block, -1) for block in updated]))
    builder.need(kernels, fetches)
    builder.need(stores, kernels)
    return frozenset(updated)


def _elsewhere(
    context: Context, rows: Ints, offloads: Mapping[int, int]
) -> tuple[np.ndarray, Ints]:
    """Gradient bytes that an update fetches, and the offload it waits for, where another device
    made the gradients (0 and -1 where its own did).
    """
    columns, plan = context.columns, context.plan
    offload_of = {int(columns.stages[row]): task for row, task in offloads.items()}
    num_bytes, needs = [], []
    for device, block in zip(columns.devices[rows], columns.stages[rows].tolist(), strict=True):
        stage = plan.backward_stage_of(block)
        own = plan.backward_stages[stage].device == device
        num_bytes.append(0.0 if own else context.costs.blocks[block].gradient_bytes)
        needs.append(-1 if own else offload_of.get(stage, -1))
    return np.array(num_bytes), np.array(needs, dtype=np.int64)
