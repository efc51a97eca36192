"""Data parallelism: a schedule repeated on other devices, each copy with its share of the batch.

Replicas are routes (:class:`penstock.protocol.plan.plan.Plan`). Replica r has the stages of the
original on the next devices, and the next of equal, consecutive shares of the micro-batches. Each
computes gradients of every block, and the result is that of one replica with all the micro-batches.
:func:`with_reduction` chooses where the sums are made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from penstock.host.errors import ConfigError
from penstock.planner.schedule.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.schedule.schedule import Schedule
from penstock.protocol.plan.instructions import (
    BackwardWeight,
    Forward,
    Keep,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.plan import StageRange
from penstock.protocol.plan.reduction import spans_nodes
from penstock.protocol.plan.semantics import side_of


def replicate(schedule: Schedule, replicas: int) -> Schedule:
    """Returns the schedule ``replicas`` times: as many times the devices, micro-batches and routes.

    Updates on devices stay with the first replica: its nodes own the blocks.

    Raises:
        ConfigError: activations are kept, and forward and backward stages are not as many.
    """
    layout = schedule.layout
    if replicas == 1:
        return schedule
    keeps = any(
        isinstance(i, Forward) and i.keep in (Keep.ALL, Keep.SELECTIVE)
        for order in schedule.orders
        for i in order
    )
    if keeps and len(layout.forward) != len(layout.backward):
        # A stage with a kept graph has one number in both lists, which the shift would undo.
        raise ConfigError(
            f"schedule.replicas = {replicas}: {schedule.scheme} keeps activations with"
            f" {len(layout.forward)} forward and {len(layout.backward)} backward stages; with"
            " replicas both must be as many, or schedule.recompute full"
        )
    copies = range(replicas)
    return replace(
        schedule,
        layout=StageLayout(
            num_devices=layout.num_devices * replicas,
            num_microbatches=layout.num_microbatches * replicas,
            forward=tuple(_on(stage, r, layout) for r in copies for stage in layout.forward),
            backward=tuple(_on(stage, r, layout) for r in copies for stage in layout.backward),
            routes=tuple(
                r * layout.num_routes + layout.route_of(m)
                for r in copies
                for m in range(layout.num_microbatches)
            ),
        ),
        orders=tuple(_order(order, r, layout) for r in copies for order in schedule.orders),
    )


def with_reduction(
    schedule: Schedule, wanted: bool | Literal["auto"], devices_per_node: int
) -> Schedule:
    """Returns the schedule with REDUCE_GRADIENTS or without.

    Without, the optimizer's pass over a block sums what all routes contribute, which costs host
    memory and reads but no traffic within a node. With them devices send their sums to one, so that
    the optimizer reads one contribution. ``auto``: where a stage's routes are on several nodes.

    Raises:
        ConfigError: the scheme shares out weights, which needs reductions.
    """
    if schedule.shards_weights and wanted is not False:
        return schedule
    if schedule.shards_weights:
        raise ConfigError(
            f"schedule.reduce_gradients = false: {schedule.scheme} shares out weights, and reduces"
            " gradients with them; accepted: true, auto"
        )
    layout = schedule.layout
    reduces = spans_nodes(layout, devices_per_node) if wanted == "auto" else wanted
    return replace(schedule, reduces_gradients=reduces and layout.num_routes > 1)


def _on(stage: StageRange, replica: int, layout: StageLayout) -> StageRange:
    return replace(stage, device=stage.device + replica * layout.num_devices)


def _order(order: Order, replica: int, layout: StageLayout) -> Order:
    return tuple(
        _moved(instruction, replica, layout)
        for instruction in order
        if not replica or not isinstance(instruction, Update)
    )


def _moved(
    instruction: OrderedInstruction, replica: int, layout: StageLayout
) -> OrderedInstruction:
    micro_batches = replica * layout.num_microbatches
    match instruction:
        case Update():
            return instruction
        case BackwardWeight(stage=stage, micro_batches=several):
            return replace(
                instruction,
                stage=stage + replica * len(layout.backward),
                micro_batches=tuple(m + micro_batches for m in several),
            )
        case SwapOut(peer=peer) | SwapIn(peer=peer) if peer is not None:
            instruction = replace(instruction, peer=peer + replica * layout.num_devices)
    stages = len(layout.stages(side_of(instruction)))
    return replace(
        instruction,
        stage=instruction.stage + replica * stages,
        micro_batch=instruction.micro_batch + micro_batches,
    )
