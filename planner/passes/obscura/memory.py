"""Memory that the stages of a schedule need, as Obscura's section 6.2 counts it.

``M_s = W_s + A_s``: the constant memory of a stage, and activations of the micro-batches it holds.
Bytes that depend on a system's way to recompute are added (:class:`Grain`). So is room for
workspace and tensors between stages, which the paper leaves out. So a schedule that fits here also
fits by the ledger of its plan (:mod:`penstock.planner.memory.footprint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.host.sums import added
from penstock.planner.cost.costs import Costs
from penstock.planner.passes.obscura.shape import StageOrder, stage_orders
from penstock.planner.schedule.layout import Order, StageLayout
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes.base import Recomputation
from penstock.protocol.plan.instructions import Backward, Forward, SwapIn, SwapOut

_ON_THEIR_WAY = 4
"""Activations and gradients that a stage receives, has received, and sends, at most at once."""


class Grain(StrEnum):
    """The part of a stage that is recomputed before its backward begins."""

    STAGE = "stage"
    """All of it: this system's RECOMPUTE."""
    BLOCK = "block"
    """One block at a time, inside the backward: checkpointing in DeepSpeed, the paper's system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage: ``fixed_bytes`` (W_s and workspace), ``kept_bytes`` of a micro-batch
    after its forward, and ``remade_bytes`` that its recomputation adds until its backward ends.
    """

    fixed_bytes: float
    kept_bytes: float
    remade_bytes: float

    def with_microbatches(self, held: float) -> float:
        """Returns the bytes with so many micro-batches held, one of them recomputed."""
        return self.fixed_bytes + held * self.kept_bytes + self.remade_bytes


def fixed_bytes(costs: Costs, blocks: range) -> float:
    """Returns weights, gradients, optimizer state on the device (W_s), workspace, and tensors on
    their way.
    """
    stage = costs.of(blocks)
    around = costs.blocks[max(blocks.start - 1, 0) : blocks.stop]
    return (
        stage.weight_bytes
        + stage.device_gradient_bytes
        + stage.static_bytes
        + stage.workspace_bytes
        + _ON_THEIR_WAY * max(block.output_bytes for block in around)
    )


def stage_memory(
    layout: StageLayout, costs: Costs, stage: int, recompute: Recomputation, grain: Grain
) -> StageMemory:
    """Returns the memory of a stage that recomputes like this."""
    blocks = layout.forward[stage].blocks
    cost = costs.of(blocks)
    parts = [blocks] if grain is Grain.STAGE else [range(i, i + 1) for i in blocks]
    if recompute.mode == "full":
        inputs = [costs.blocks[part.start - 1].output_bytes for part in parts if part.start > 0]
        kept, remade = added(inputs), max(costs.of(part).activation_bytes for part in parts)
    else:
        kept = cost.activation_bytes - cost.drop_bytes(recompute.drop)
        remade = max(costs.of(part).remade_bytes(recompute.drop) for part in parts)
    return StageMemory(fixed_bytes=fixed_bytes(costs, blocks), kept_bytes=kept, remade_bytes=remade)


def order_memory(layout: StageLayout, costs: Costs, order: StageOrder, grain: Grain) -> float:
    """Returns the peak bytes of a stage with an order without swaps."""
    memory = stage_memory(layout, costs, order.stage, order.recompute, grain)
    return memory.with_microbatches(order.in_flight)


def schedule_memory(schedule: Schedule, costs: Costs, grain: Grain) -> tuple[float, ...]:
    """Returns the peak bytes of every stage with swaps; bytes that peers keep for others always
    count.
    """
    peaks = [0.0] * len(schedule.orders)
    for order in stage_orders(schedule, swaps=True):
        stage, instructions = order.stage, schedule.orders[order.stage]
        memory = stage_memory(schedule.layout, costs, stage, order.recompute, grain)
        peaks[stage] += memory.with_microbatches(held_microbatches(instructions))
        peer = next((i.peer for i in instructions if isinstance(i, SwapOut)), None)
        if peer is not None:
            peaks[peer] += away_microbatches(instructions) * memory.kept_bytes
    return tuple(peaks)


def away_microbatches(order: Order) -> float:
    """Returns the most micro-batches with activations elsewhere; parts count as parts."""
    away = most = 0.0
    for instruction in order:
        match instruction:
            case SwapOut(fraction=fraction):
                away += fraction
                most = max(most, away)
            case SwapIn(fraction=fraction):
                away -= fraction
    return most


def held_microbatches(order: Order) -> float:
    """Returns the most micro-batches with activations on the device; parts count as parts.

    A swap counts from where it starts: a SWAP_OUT has the next backward's time, or in the warm-up
    the next forwards', to end.
    """
    held = most = 0.0
    for instruction in order:
        match instruction:
            case Forward():
                held += 1.0
            case SwapIn(fraction=fraction):
                held += fraction
            case SwapOut(fraction=fraction):
                held -= fraction
            case Backward():
                most = max(most, held)
                held -= 1.0
    return most
