"""Optimizer work: on the cores of nodes, and updates on devices.

A **unit** is one piece of a node's work: blocks that are settled in the same way, with gradients
from the same copies. So it is a block, or one backward stage (``by_block`` of offloads). One
optimizer owns a block and sums the partials of routes, which other nodes send it. If gradients are
reduced there is one partial, made on the node of the owner
(:mod:`penstock.protocol.plan.reduction`).

An UPDATE takes a block from its unit. The block is settled at the start of the attempt. Its state
is fetched when the instruction is issued. Its kernel runs on the compute stream when the state has
come and nothing else can run. Its weights go back after the kernel. A flushing UPDATE sends its
state back as well, and its block needs no settling. Its bytes are those of a sweep that reads the
gradients from device memory. On another device than the one that made them, they are fetched as
well. A resident's state is not fetched; its kernel takes twice as long, since it takes the last
commit in first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isinf
from typing import Any

import numpy as np

from penstock.host.sums import added
from penstock.planner.cost.cluster import PREVIEW_SETTLE, OptimizerModel, OptimizerStart
from penstock.planner.simulate.columns import Ints
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.gradients import Offloads
from penstock.planner.simulate.graph import Label
from penstock.protocol.plan.instructions import Update
from penstock.protocol.plan.semantics import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """``rows`` and tasks (``copies``) of the offloads that bring gradients; ``way``: how its blocks
    are done; ``domain``: the NUMA domain, numbered over all nodes, that it is done in.
    """

    node: int
    domain: int
    blocks: tuple[int, ...]
    rows: tuple[int, ...]
    copies: tuple[int, ...]
    way: OptimizerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """A sweep over some of a unit's parameters; ``speed`` of the cores, relative to their rate."""

    unit: _Unit
    parameters: float
    bytes_each: float
    speed: float


def add_optimizer(context: Context, offloads: Offloads, optimizer: OptimizerModel) -> None:
    """Adds the work of all nodes and devices that follows the offloads."""
    if not offloads:
        return
    flush = -1
    if optimizer.start is OptimizerStart.FLUSH or context.cluster.shares_cores:
        copies = sorted(set(offloads.values()))
        flush = context.barrier(np.array(copies), min(row for row, _ in offloads))
    units = _units(context, offloads, optimizer)
    settled = _add_settles(context, units)
    updated = _add_updates(context, offloads, settled, flush)
    left = [unit for unit in units if not updated.issuperset(unit.blocks)]
    sweeps = _add_sweeps(context, [_tail(context, u, updated) for u in left], Label.OPTIMIZER)
    # A node's sweeps run in the order in which their gradients come, as in optimizerd. Settles were
    # there first: they run first without being waited for, which would cost a sweep its turn.
    context.builder.need(sweeps, flush)
    _await_gradients(context, left, sweeps)
    if optimizer.mirrored:
        _mirror(context, units)


def _tail(context: Context, unit: _Unit, updated: frozenset[int]) -> _Sweep:
    """Returns the sweep behind the gradients of what no device updates."""
    return _Sweep(
        unit=unit,
        parameters=_parameters(context, (b for b in unit.blocks if b not in updated)),
        bytes_each=unit.way.tail_bytes,
        speed=context.cluster.preview_speed if unit.way.settle_bytes > 0.0 else 1.0,
    )


def _add_settles(context: Context, units: list[_Unit]) -> dict[int, int]:
    """Adds settles from the start of the attempt on; returns them by block. Settled are units with
    a sweep of their own, and blocks that devices update.
    """
    updated = frozenset(context.plan.updates).difference(context.plan.flushed)
    flushed = frozenset(context.plan.flushed)
    sweeps: list[_Sweep] = []
    due: list[list[int]] = []
    for unit in units:
        early = unit.way.settle_bytes > 0.0
        blocks = [b for b in unit.blocks if (early and b not in flushed) or b in updated]
        if blocks:
            due.append(blocks)
            sweeps.append(
                _Sweep(
                    unit=unit,
                    parameters=_parameters(context, blocks),
                    bytes_each=unit.way.settle_bytes or PREVIEW_SETTLE.settle_bytes,
                    speed=context.cluster.settle_speed,
                )
            )
    tasks = _add_sweeps(context, sweeps, Label.SETTLE).tolist()
    return {block: task for blocks, task in zip(due, tasks, strict=True) for block in blocks}


def _units(context: Context, offloads: Offloads, optimizer: OptimizerModel) -> list[_Unit]:
    """Returns units, last stage first: the order of work where gradients arrive together."""
    early = frozenset(context.plan.settled_early if optimizer.early is not None else ())
    columns, cluster = context.columns, context.cluster
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, block in sorted(offloads, key=lambda place: int(columns.stages[place[0]])):
        rows_of[block].append(row)
    grouped: dict[tuple[tuple[int, ...], tuple[int, ...], int, bool], list[int]] = defaultdict(list)
    for block, rows in rows_of.items():
        domain = cluster.domain_of(context.reduction.owner_device(block))
        copies = tuple(offloads[row, block] for row in rows)
        grouped[tuple(rows), copies, domain, block in early].append(block)
    units = [
        _Unit(
            node=domain // cluster.numa_domains,
            domain=domain,
            blocks=tuple(blocks),
            rows=rows,
            copies=copies,
            way=(optimizer.early or optimizer) if apart else optimizer,
        )
        for (rows, copies, domain, apart), blocks in grouped.items()
    ]
    return sorted(units, key=lambda unit: int(columns.stages[unit.rows[0]]), reverse=True)


def _parameters(context: Context, blocks: Iterable[int]) -> float:
    return added(context.costs.blocks[block].parameters for block in blocks)


def _add_sweeps(context: Context, sweeps: list[_Sweep], label: Label) -> Ints:
    """Adds sweeps of nodes' cores; without limit of DRAM they take the time of the cores."""
    cluster, network = context.cluster, context.network
    nodes = np.array([one.unit.node for one in sweeps], dtype=np.int64)
    queues = np.array([_queue(context, one.unit) for one in sweeps], dtype=np.int64)
    seconds, amounts = np.zeros(len(sweeps)), np.zeros(len(sweeps))
    routes = np.full(len(sweeps), -1, dtype=np.int32)
    for index, one in enumerate(sweeps):
        rate = cluster.optimizer_rate / cluster.numa_domains * one.speed
        rate = min(rate, one.unit.way.stage_rate)
        if one.bytes_each > 0.0 and not isinf(cluster.dram_bandwidth):
            amounts[index] = one.parameters * one.bytes_each
            routes[index] = network.optimizer(one.unit.domain, rate * one.bytes_each)
        else:
            seconds[index] = one.parameters / rate
    return context.builder.add(
        len(sweeps),
        lane=Lane.OPTIMIZER,
        queues=context.queues.optimizer(queues),
        origins=np.array([one.unit.rows[0] for one in sweeps], dtype=np.int64),
        places=nodes,
        label=label,
        seconds=seconds,
        amounts=amounts,
        routes=routes,
        unordered=True,
    )


def _queue(context: Context, unit: _Unit) -> int:
    """Returns the queue of the domain's cores, or of the threads that the unit's stage has."""
    if isinf(unit.way.stage_rate):
        return unit.domain
    cluster = context.cluster
    domains = cluster.domain_of(context.plan.num_devices - 1) + 1
    return domains + int(context.columns.stages[unit.rows[0]])


def _await_gradients(context: Context, units: list[_Unit], sweeps: Ints) -> None:
    """Lets sweeps wait for the offloads of their units, and for gradients of other nodes."""
    devices, node_of = context.columns.devices, context.cluster.node_of
    waiting: list[int] = []
    needed: list[int] = []
    for unit, task in zip(units, sweeps.tolist(), strict=True):
        for row, offload in zip(unit.rows, unit.copies, strict=True):
            source = node_of(int(devices[row]))
            waiting.append(task)
            local = source == unit.node
            needed.append(
                offload if local else _add_pull(context, unit, row, offload, target=unit.node)
            )
    context.builder.need(np.array(waiting, dtype=np.int64), np.array(needed, dtype=np.int64))


def _mirror(context: Context, units: list[_Unit]) -> None:
    """Adds what partners read: a commit waits for it. Their own node's part crosses no NIC."""
    devices, node_of = context.columns.devices, context.cluster.node_of
    num_nodes = node_of(context.plan.num_devices - 1) + 1
    for unit in units:
        keeper = (unit.node + 1) % num_nodes
        for row, offload in zip(unit.rows, unit.copies, strict=True):
            if node_of(int(devices[row])) != keeper:
                _add_pull(context, unit, row, offload, target=keeper)


def _add_pull(context: Context, unit: _Unit, row: int, offload: int, *, target: int) -> int:
    """Adds the transfer, to a node, of a unit's part of what another one offloaded; returns its
    task.
    """
    device = int(context.columns.devices[row])
    blocks, source = context.costs.blocks, context.cluster.node_of(device)
    task = context.builder.add(
        1,
        lane=Lane.REDUCE,
        queues=context.queues.collective(device),
        origins=row,
        places=device,
        amounts=added(blocks[block].gradient_bytes for block in unit.blocks),
        routes=context.network.nodes(source, target),
        delays=context.cluster.latency_s,
        unordered=True,
    )
    context.builder.need(task, np.array([offload]))
    return int(task[0])


def _add_updates(
    context: Context, offloads: Offloads, settled: Mapping[int, int], flush: int
) -> frozenset[int]:
    """Adds fetch, kernel and offload of every UPDATE; returns their blocks."""
    columns, cluster, builder = context.columns, context.cluster, context.builder
    rows = columns.rows(Update)
    if not len(rows):
        return frozenset()
    devices, updated = columns.devices[rows], columns.stages[rows].tolist()
    parameters = np.array([context.costs.blocks[block].parameters for block in updated])
    residents = np.array([update.resident for update in columns.at(rows)])
    returned = [cluster.update_bytes_out(flush=update.flush) for update in columns.at(rows)]
    gradients, needs = _elsewhere(context, rows, offloads)
    common: dict[str, Any] = {"origins": rows, "places": devices}
    fetches = builder.add(
        len(rows),
        lane=Lane.FETCH,
        queues=context.queues.fetch(devices),
        amounts=np.where(residents, 0.0, parameters * cluster.update_fetch_bytes) + gradients,
        routes=[context.network.fetch(device) for device in devices.tolist()],
        **common,
    )
    kernels = builder.add(
        len(rows),
        lane=Lane.UPDATE,
        queues=context.queues.compute(devices),
        seconds=np.where(residents, 2.0, 1.0) * parameters / cluster.device_optimizer_rate,
        unordered=True,
        **common,
    )
    stores = builder.add(
        len(rows),
        lane=Lane.OFFLOAD,
        queues=context.queues.offload(devices),
        amounts=parameters * np.array(returned),
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


def _elsewhere(context: Context, rows: Ints, offloads: Offloads) -> tuple[np.ndarray, Ints]:
    """Returns the gradient bytes that updates fetch, and the offloads they wait for, if another
    device made the gradients; otherwise 0 and -1.
    """
    columns, plan = context.columns, context.plan
    copies = {(int(columns.stages[row]), block): task for (row, block), task in offloads.items()}
    num_bytes, needs = [], []
    for device, block in zip(columns.devices[rows], columns.stages[rows].tolist(), strict=True):
        stage = context.reduction.roots[plan.backward_stage_of(block)]
        is_local = plan.backward_stages[stage].device == device
        num_bytes.append(0.0 if is_local else context.costs.blocks[block].gradient_bytes)
        needs.append(-1 if is_local else copies.get((stage, block), -1))
    return np.array(num_bytes), np.array(needs, dtype=np.int64)
