"""Naive pipelining: one micro-batch at a time goes all the way down and all the way back.

Source: table 1 and figure 1 of the 2BP paper, with one micro-batch, the whole mini-batch. With
several micro-batches it is gradient accumulation over a model-parallel cut. One device works at any
time, so the bubble is (p - 1) / p for any number of micro-batches. Each device keeps the
activations of one micro-batch. Weights stay on their devices (one buffer).
"""

from __future__ import annotations

from penstock.planner.schedule.layout import ComputeInstruction, Order, StageLayout
from penstock.planner.schemes.base import (
    Recomputation,
    Scheme,
    one_stage_per_device,
    require_one_per_device,
    round_robin,
)


def _orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    return tuple(_device_order(layout, stage, recompute) for stage in range(layout.num_devices))


def _device_order(layout: StageLayout, stage: int, recompute: Recomputation) -> Order:
    order: list[ComputeInstruction] = []
    for micro_batch in range(layout.num_microbatches):
        order.append(recompute.forward(stage, micro_batch))
        order.extend(recompute.backward(stage, micro_batch))
    return tuple(order)


SCHEME = Scheme(
    name="naive",
    recompute_modes=("none", "full", "selective"),
    default_stages=one_stage_per_device,
    check_stages=require_one_per_device,
    place=round_robin,
    order=_orders,
)
