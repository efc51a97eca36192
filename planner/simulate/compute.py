"""Compute instructions as tasks of their devices' compute streams."""

from __future__ import annotations

import numpy as np

from penstock.planner.simulate.columns import CODES
from penstock.planner.simulate.context import Context
from penstock.planner.simulate.graph import Floats
from penstock.planner.simulate.lanes import Lane
from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Keep,
    Recompute,
)


def add_compute(context: Context, *, stops_early: bool) -> None:
    """The first tasks of the graph: task i is row ``columns.computes[i]``."""
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
    columns, layout = context.columns, context.layout
    forward = [context.forward(stage) for stage in range(len(layout.forward))]
    backward = [context.backward(stage) for stage in range(len(layout.backward))]
    per_stage = {
        Forward: [cost.forward_s for cost in forward],
        Recompute: [cost.recompute_s for cost in backward],
        Backward: [cost.backward_s for cost in backward],
        BackwardInput: [cost.backward_input_s for cost in backward],
        BackwardWeight: [cost.backward_weight_s for cost in backward],
    }
    seconds = np.zeros(len(columns.codes))
    for kind, table in per_stage.items():
        rows = np.flatnonzero(columns.codes == CODES[kind])
        seconds[rows] = np.array(table)[columns.stages[rows]]
    weights = columns.rows(BackwardWeight)
    seconds[weights] *= columns.map(weights, lambda work: len(work.micro_batches))
    if context.drops:
        _make_dropped_again(context, seconds)
    if stops_early:
        _stop_at_last_checkpoint(context, seconds)
    return seconds[columns.computes] + context.costs.instruction_s


def _make_dropped_again(context: Context, seconds: Floats) -> None:
    """A recomputation after ``keep=selective`` makes only what was dropped."""
    cache: dict[tuple[int, tuple[str, ...]], float] = {}
    rows = context.columns.rows(Recompute)
    for row, work in zip(rows.tolist(), context.columns.at(rows), strict=True):
        drop = context.drops.get((work.stage, work.micro_batch))
        if drop is not None:
            if (work.stage, drop) not in cache:
                cache[work.stage, drop] = context.backward(work.stage).drop_seconds(drop)
            seconds[row] = cache[work.stage, drop]


def _stop_at_last_checkpoint(context: Context, seconds: Floats) -> None:
    """The last forward stage of a route with ``keep=input`` leaves checkpoints and nothing else."""
    layout, columns = context.layout, context.columns
    for stage, blocks in enumerate(s.blocks for s in layout.forward):
        if not layout.is_last_forward(stage):
            continue
        starts = (layout.backward[b].start for b in layout.checkpoints_of(stage))
        needed = range(blocks.start, max(starts, default=blocks.start))
        rows = np.flatnonzero((columns.codes == CODES[Forward]) & (columns.stages == stage))
        partial = columns.map(rows, lambda forward: forward.keep is Keep.INPUT) > 0
        seconds[rows[partial]] = context.costs.of(needed).forward_s
