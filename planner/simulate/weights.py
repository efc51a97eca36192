"""Weights into buffers: fetches, gathered shards, and the instructions that wait for them.

With ``shards_weights`` a device fetches its share of a stage. Then the devices that fetch the same
blocks pass their shares around a ring (an all-gather).
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from penstock.host.sums import added
from penstock.planner.simulate.columns import CODES, Ints
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.graph import Label
from penstock.planner.simulate.transfers import add_ring
from penstock.protocol.plan.instructions import FetchWeights, Phase, ReleaseWeights
from penstock.protocol.plan.semantics import COMPUTES, SEMANTICS, Lane

_FORWARD = [CODES[cls] for cls in COMPUTES if SEMANTICS[cls.opcode].side is Phase.FORWARD]
"""Codes of what computes with a forward stage."""


def add_weights(context: Context, *, from_owners: bool = False) -> None:
    """Adds fetches; each starts when it is issued, which is after the release before it. If devices
    share the host's cores, a fetch is one of the instructions that a device computes. Shards are
    whole then: the host has all of them.

    ``from_owners``: blocks that another node owns come from its memory; otherwise every node has
    all weights.
    """
    columns = context.columns
    rows = columns.rows(FetchWeights)
    if not len(rows):
        return
    forward = columns.map(rows, lambda fetch: fetch.phase is Phase.FORWARD) > 0
    devices, stages = columns.devices[rows], columns.stages[rows]
    ranges = (context.layout.backward, context.layout.forward)
    blocks = [ranges[f][s].blocks for f, s in zip(forward.tolist(), stages.tolist(), strict=True)]
    queues, shares_cores = context.queues, context.cluster.shares_cores
    gathers = context.plan.shards_weights and not shares_cores
    share = 1.0 / context.plan.num_devices if gathers else 1.0
    fetches = context.builder.add(
        len(rows),
        lane=Lane.FETCH,
        queues=queues.compute(devices) if shares_cores else queues.fetch(devices),
        origins=rows,
        places=devices,
        amounts=[share * context.costs.of(b).weight_bytes for b in blocks],
        routes=[context.network.fetch(device) for device in devices.tolist()],
    )
    context.issue(fetches, rows)
    if from_owners:
        _read_from_owners(context, fetches, rows, blocks)
    if gathers:
        fetches = _gather(context, fetches, rows, blocks)
    _add_users(context, fetches, rows, forward)


def _read_from_owners(context: Context, fetches: Ints, rows: Ints, blocks: list[range]) -> None:
    """Lets fetches wait for what comes from other nodes."""
    node_of, costs = context.cluster.node_of, context.costs.blocks
    owners = [node_of(context.reduction.owner_device(b)) for b in range(len(costs))]
    devices = context.columns.devices[rows].tolist()
    for fetch, row, device, stage in zip(
        fetches.tolist(), rows.tolist(), devices, blocks, strict=True
    ):
        for owner in sorted({owners[block] for block in stage} - {node_of(device)}):
            read = context.builder.add(
                1,
                lane=Lane.REDUCE,
                queues=context.queues.collective(device),
                origins=row,
                places=device,
                amounts=added(
                    costs[block].weight_bytes for block in stage if owners[block] == owner
                ),
                routes=context.network.nodes(owner, node_of(device)),
                delays=context.cluster.latency_s,
                unordered=True,
            )
            context.issue(read, np.array([row]))
            context.builder.need(np.array([fetch]), read)


def _gather(context: Context, fetches: Ints, rows: Ints, blocks: list[range]) -> Ints:
    """Returns for each fetch the task that ends when all shares have come."""
    members: dict[tuple[range, int], list[int]] = defaultdict(list)
    fetched: dict[tuple[int, range], int] = defaultdict(int)
    devices = context.columns.devices[rows].tolist()
    for index, (device, stage) in enumerate(zip(devices, blocks, strict=True)):
        fetched[device, stage] += 1
        members[stage, fetched[device, stage]].append(index)
    gathered = fetches.copy()
    for (stage, _), group in members.items():
        share = context.costs.of(stage).weight_bytes / context.plan.num_devices
        gathered[group] = add_ring(
            context,
            rows=rows[group],
            needs=fetches[group],
            amount=share * (len(group) - 1),
            label=Label.INSTRUCTION,
        )
    return gathered


def _add_users(context: Context, fetches: Ints, rows: Ints, forward: np.ndarray) -> None:
    """Lets the first instruction that computes with a buffer wait for its fetch.

    RECOMPUTE and BACKWARD use the stage's backward buffer if there is one, else its forward buffer.
    """
    columns, num_rows = context.columns, len(context.columns.codes)
    releases = columns.rows(ReleaseWeights)
    released = columns.map(releases, lambda release: release.phase is Phase.FORWARD) > 0
    buffers = np.concatenate(
        (_buffers(context, rows, forward), _buffers(context, releases, released))
    )
    tasks = np.concatenate((fetches, np.full(len(releases), -1)))
    changes = buffers * num_rows + np.concatenate((rows, releases))
    order = np.argsort(changes)
    changes, tasks = changes[order], tasks[order]
    computes = columns.computes

    def filled(in_forward: np.ndarray) -> Ints:
        """Returns the fetch that filled a buffer when a compute instruction is reached, or -1."""
        required = _buffers(context, computes, in_forward)
        place = np.searchsorted(changes, required * num_rows + computes) - 1
        same = (place >= 0) & (changes[place] // num_rows == required)
        return np.where(same, tasks[place], -1)

    is_forward = np.isin(columns.codes[computes], _FORWARD)
    from_forward, shared = filled(is_forward), filled(np.ones(len(computes), dtype=np.bool_))
    used = np.where(from_forward >= 0, from_forward, shared)
    # By device, because one gathering task fills the buffers of all of them.
    by_device = used * context.plan.num_devices + columns.devices[computes]
    first_users = np.unique(by_device, return_index=True)[1]
    context.builder.need(first_users, used[first_users])


def _buffers(context: Context, rows: Ints, forward: np.ndarray) -> Ints:
    """Returns a number for (device, phase, stage) of each row."""
    columns, layout = context.columns, context.layout
    num_stages = max(len(layout.forward), len(layout.backward))
    buffers: Ints = (columns.devices[rows] * 2 + forward) * num_stages + columns.stages[rows]
    return buffers
