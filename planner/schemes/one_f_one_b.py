"""1F1B: after a warm-up each device alternates one forward and one backward, one stage per device.

Source: Fan et al., "DAPPLE", 2021; Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training", 2021. Device d of p starts with min(p - 1 - d, m) forwards. The bubble is that of GPipe,
(p - 1) / (m + p - 1), but device d keeps at most min(p - d, m) micro-batches. Its weights stay on
the device (one buffer).
"""

from __future__ import annotations

from penstock.planner.layout import ComputeInstruction, Order, StageLayout
from penstock.planner.schemes.base import (
    Recomputation,
    Scheme,
    one_stage_per_device,
    require_one_per_device,
    round_robin,
)


def one_forward_one_backward(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    """Warm-up forwards, then pairs, then the remaining backwards."""
    return tuple(_device_order(layout, stage, recompute) for stage in range(layout.num_devices))


def _device_order(layout: StageLayout, stage: int, recompute: Recomputation) -> Order:
    count = layout.num_microbatches
    warmup = min(layout.num_devices - 1 - stage, count)
    order: list[ComputeInstruction] = []
    for step in range(count + warmup):
        if step < count:
            order.append(recompute.forward(stage, step))
        if step >= warmup:
            order.extend(recompute.backward(stage, step - warmup))
    return tuple(order)


SCHEME = Scheme(
    name="1f1b",
    recompute_modes=("none", "full", "selective"),
    default_stages=one_stage_per_device,
    check_stages=require_one_per_device,
    place=round_robin,
    order=one_forward_one_backward,
)
