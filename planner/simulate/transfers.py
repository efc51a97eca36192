"""Tensors between devices as tasks of ordered links, and who waits for them."""

from __future__ import annotations

import numpy as np

from penstock.planner.simulate.columns import Columns, Ints
from penstock.planner.simulate.context import Context, lookup
from penstock.planner.simulate.graph import Floats, Label
from penstock.planner.simulate.lanes import Lane
from penstock.protocol.errors import ConfigError
from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Recompute,
    RecomputeAfter,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)

_SENDS = (SendActivation, SendGradient, SendCheckpoint)
_RECEIVES = (RecvActivation, RecvGradient, RecvCheckpoint)
_ACTIVATION, _GRADIENT, _CHECKPOINT = range(3)


def add_transfers(context: Context) -> None:
    """One task for each send: it starts when sent and posted, behind what was sent before it."""
    columns, builder = context.columns, context.builder
    rows = columns.rows(*_SENDS)
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
    stages, kinds = columns.stages[rows], _kinds(columns, rows, _SENDS)
    amounts = np.empty(len(rows))
    forward = kinds == _ACTIVATION
    amounts[forward] = outputs[stages[forward]]
    amounts[~forward] = inputs[stages[~forward]]
    return amounts


def _routes(context: Context, sources: Ints, targets: Ints) -> Ints:
    num_devices = context.plan.num_devices
    pairs, which = np.unique(sources * num_devices + targets, return_inverse=True)
    link = context.network.link
    routes = np.array([link(*divmod(pair, num_devices)) for pair in pairs.tolist()])
    found: Ints = routes[which]
    return found


def _receives(context: Context, sends: Ints, targets: Ints) -> Ints:
    """Row of the receive of each send."""
    columns = context.columns
    receives = columns.rows(*_RECEIVES)
    posted = _keys(context, receives, _kinds(columns, receives, _RECEIVES))
    sent = _keys(context, sends, _kinds(columns, sends, _SENDS))
    num_devices = context.plan.num_devices
    peers = columns.numbers(receives, "peer")
    posted = (posted * num_devices + peers) * num_devices + columns.devices[receives]
    sent = (sent * num_devices + columns.devices[sends]) * num_devices + targets
    found = lookup(posted, receives, sent)
    missing = np.flatnonzero(found < 0)
    if len(missing):
        row = int(sends[missing[0]])
        raise ConfigError(
            f"plan: device {columns.devices[row]}, instruction {columns.position(row)}"
            f" ({columns.instructions[row]}): its peer never receives this"
        )
    return found


def _add_consumers(context: Context, tasks: Ints, sends: Ints, targets: Ints) -> None:
    """Compute instructions wait for what was sent to their device."""
    columns, num_devices = context.columns, context.plan.num_devices
    arriving = _keys(context, sends, _kinds(columns, sends, _SENDS)) * num_devices + targets

    def wait(rows: Ints, kind: int, step: int) -> None:
        wanted = _keys(context, rows, np.full(len(rows), kind), step=step)
        wanted = wanted * num_devices + columns.devices[rows]
        numbers = np.searchsorted(columns.computes, rows)
        context.builder.need(numbers, lookup(arriving, tasks, wanted))

    wait(columns.rows(Forward), _ACTIVATION, -1)
    wait(columns.rows(Backward, BackwardInput), _GRADIENT, 1)
    recomputes = columns.rows(Recompute)
    wait(recomputes, _CHECKPOINT, 0)
    late = columns.map(recomputes, lambda work: work.after is RecomputeAfter.GRADIENT) > 0
    wait(recomputes[late], _GRADIENT, 1)


def _kinds(columns: Columns, rows: Ints, order: tuple[type[Instruction], ...]) -> Ints:
    """Which of the three tensors a send or receive moves."""
    kinds = np.zeros(len(columns.codes), dtype=np.int64)
    for kind, instruction in enumerate(order):
        kinds[columns.rows(instruction)] = kind
    found: Ints = kinds[rows]
    return found


def _keys(context: Context, rows: Ints, kinds: Ints, *, step: int = 0) -> Ints:
    """A number for (tensor, stage + step, micro-batch)."""
    columns, layout = context.columns, context.layout
    num_stages = len(layout.forward) + len(layout.backward) + 2
    stages = columns.stages[rows] + step + 1
    keys: Ints = kinds * num_stages + stages
    return keys * layout.num_microbatches + columns.micro_batches[rows]
