"""1F1B: after a warm-up each device alternates one forward and one backward, one stage per device.

Source: Fan et al., "DAPPLE", 2021; Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training", 2021. Device d of p starts with min(p - 1 - d, m) forwards. The bubble is that of GPipe,
(p - 1) / (m + p - 1), but device d keeps at most min(p - d, m) micro-batches. Its weights stay on
the device (one buffer).
"""

from __future__ import annotations

from penstock.planner.layout import ComputeInstruction, Order, StageLayout
from penstock.planner.schemes.base import (
    RecomputeMode,
    Scheme,
    backward_of,
    kept_by_forward,
    one_stage_per_device,
    require_one_per_device,
    round_robin,
)
from penstock.protocol.instructions import Forward


def one_forward_one_backward(layout: StageLayout, recompute: RecomputeMode) -> tuple[Order, ...]:
    """Warm-up forwards, then pairs, then the remaining backwards."""
    return tuple(_device_order(layout, stage, recompute) for stage in range(layout.num_devices))


def _device_order(layout: StageLayout, stage: int, recompute: RecomputeMode) -> Order:
    count = layout.num_microbatches
    warmup = min(layout.num_devices - 1 - stage, count)
    order: list[ComputeInstruction] = []
    for step in range(count + warmup):
        if step < count:
            keep = kept_by_forward(recompute)
            order.append(Forward(stage=stage, micro_batch=step, keep=keep))
        if step >= warmup:
            order.extend(backward_of(stage, step - warmup, recompute))
    return tuple(order)


SCHEME = Scheme(
    name="1f1b",
    recompute_modes=("none", "full"),
    default_stages=one_stage_per_device,
    check_stages=require_one_per_device,
    place=round_robin,
    order=one_forward_one_backward,
)
