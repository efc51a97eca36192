"""Tensors between devices as tasks of ordered links, and the instructions that wait for them.

In a collective every member sends to the next of a ring, all at the same time. A ring all-reduce of
n members sends 2 (n - 1) / n of the data over each link. A reduce-scatter or an all-gather sends
half of that. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.
"""

from __future__ import annotations

import numpy as np

from penstock.host.errors import ConfigError
from penstock.planner.simulate.columns import CODES, Ints
from penstock.planner.simulate.context import Context, lookup
from penstock.planner.simulate.graph import Floats, Label
from penstock.protocol.plan.instructions import Instruction
from penstock.protocol.plan.resources import TensorKind
from penstock.protocol.plan.semantics import COMPUTES, RECEIVES, SEMANTICS, SENDS, Condition, Lane

_NUMBERS = {kind: number for number, kind in enumerate(TensorKind)}
_KINDS = np.zeros(len(CODES), dtype=np.int64)
"""The tensor that a send or receive moves, by code."""
for _transfers in (SENDS, RECEIVES):
    _KINDS[[CODES[_transfers[kind]] for kind in TensorKind]] = [_NUMBERS[k] for k in TensorKind]
_KINDS.flags.writeable = False


def add_transfers(context: Context) -> None:
    """Adds a task for each send: it starts when sent and posted, behind what was sent before."""
    columns, builder = context.columns, context.builder
    rows = columns.rows(*SENDS.values())
    if not len(rows):
        return
    sources, targets = columns.devices[rows], columns.numbers(rows, "peer")
    tasks = builder.add(
        len(rows),
        lane=Lane.LINK,
        queues=context.queues.link(sources, targets),
        origins=rows,
        places=sources,
        peers=targets,
        label=Label.TENSOR,
        amounts=_amounts(context, rows),
        routes=_routes(context, sources, targets),
        delays=context.cluster.latency_s,
    )
    context.issue(tasks, rows)
    builder.need(tasks, columns.issued_after(_receives(context, rows, targets)))
    _add_consumers(context, tasks, rows, targets)


def _amounts(context: Context, rows: Ints) -> Floats:
    columns, layout, blocks = context.columns, context.layout, context.costs.blocks
    outputs = np.array([blocks[stage.stop - 1].output_bytes for stage in layout.forward])
    # What goes into a backward stage is what comes out of the block before it.
    inputs = np.array([blocks[stage.start - 1].output_bytes for stage in layout.backward])
    stages = columns.stages[rows]
    amounts = np.empty(len(rows))
    forward = _KINDS[columns.codes[rows]] == _NUMBERS[TensorKind.ACTIVATION]
    amounts[forward] = outputs[stages[forward]]
    amounts[~forward] = inputs[stages[~forward]]
    return amounts


def _routes(context: Context, sources: Ints, targets: Ints) -> Ints:
    num_devices = context.plan.num_devices
    pairs, which = np.unique(sources * num_devices + targets, return_inverse=True)
    link = context.network.link
    routes = np.array([link(*divmod(pair, num_devices)) for pair in pairs.tolist()])
    routes_of_rows: Ints = routes[which]
    return routes_of_rows


def _receives(context: Context, sends: Ints, targets: Ints) -> Ints:
    """Returns the row of the receive of each send.

    Raises:
        ConfigError: a peer never receives what is sent.
    """
    columns = context.columns
    receives = columns.rows(*RECEIVES.values())
    posts = lookup(_tensors(context, receives), receives, _tensors(context, sends), _size(context))
    is_posted = posts >= 0
    peers = np.full(len(columns.codes), -1)
    peers[receives] = columns.numbers(receives, "peer")
    is_posted &= (columns.devices[posts] == targets) & (peers[posts] == columns.devices[sends])
    if not is_posted.all():
        row = int(sends[np.flatnonzero(~is_posted)[0]])
        raise ConfigError(
            f"plan: device {columns.devices[row]}, instruction {columns.position(row)}"
            f" ({columns.instructions[row]}): its peer never receives this"
        )
    return posts


def _add_consumers(context: Context, tasks: Ints, sends: Ints, targets: Ints) -> None:
    """Lets compute instructions wait for what was sent to their device."""
    columns, builder, size = context.columns, context.builder, context.num_pairs
    kinds = _KINDS[columns.codes[sends]]

    def wait(rows: Ints, kind: TensorKind, step: int) -> None:
        sent = np.flatnonzero(kinds == _NUMBERS[kind])
        index = lookup(context.pairs(sends[sent]), sent, context.pairs(rows, step=step), size)
        here = (index >= 0) & (targets[index] == columns.devices[rows])
        builder.need(np.searchsorted(columns.computes, rows[here]), tasks[index[here]])

    for cls in COMPUTES:
        for kind, step, _, when in SEMANTICS[cls.opcode].reads:
            if isinstance(kind, TensorKind):
                wait(_rows(context, cls, when), kind, step)


def _rows(context: Context, cls: type[Instruction], when: Condition | None) -> Ints:
    """Returns the rows of the instructions of a class that meet a condition."""
    rows, facts = context.columns.rows(cls), context.facts
    if when is None:
        return rows
    return rows[context.columns.map(rows, lambda instruction: when(instruction, facts)) > 0]


def _size(context: Context) -> int:
    return 3 * context.num_pairs


def _tensors(context: Context, rows: Ints) -> Ints:
    """Returns a number for the tensor that the send or receive of each row moves."""
    tensors: Ints = _KINDS[context.columns.codes[rows]] * context.num_pairs + context.pairs(rows)
    return tensors


def add_ring(context: Context, *, rows: Ints, needs: Ints, amount: float, label: Label) -> int:
    """Adds a ring of the devices of ``rows``; all start when all ``needs`` have ended.

    ``amount``: bytes that each member sends. Returns the task that ends when all have ended.
    """
    builder, queues = context.builder, context.queues
    ready = context.barrier(needs, int(rows[0]))
    devices = context.columns.devices[rows]
    order = np.argsort(devices)
    rows, sources = rows[order], devices[order]
    targets = np.roll(sources, -1)
    link = context.network.link
    sends = builder.add(
        len(rows),
        lane=Lane.REDUCE,
        queues=queues.collective(sources),
        origins=rows,
        places=sources,
        peers=targets,
        label=label,
        amounts=amount,
        routes=[link(a, b) for a, b in zip(sources.tolist(), targets.tolist(), strict=True)],
        delays=context.cluster.latency_s,
    )
    builder.need(sends, ready)
    return context.barrier(sends, int(rows[0]))
