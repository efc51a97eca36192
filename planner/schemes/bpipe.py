"""BPipe: 1F1B with some activations of the first devices on the last ones.

Source: Kim et al., "BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language
Models", 2023; section 9.3 of the Obscura paper for the bound. Device d and device p - 1 - d are a
pair. Plain 1F1B keeps p - d micro-batches on device d. With more than ceil((p + 2) / 2) of them
device d evicts. When a forward reaches the bound, the newest micro-batch (its backward comes last)
goes to the pair. Right after each backward the oldest comes back, ceil((p + 2) / 2) - 1 backwards
ahead of its own. Those of the pair and those it hosts are together at most ceil((p + 2) / 2) as
well.

The order is that of 1F1B. So is the bubble, (p - 1) / (m + p - 1), if the link between the devices
of a pair is fast enough. Weights stay on their devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.planner.schedule.layout import Order, OrderedInstruction, StageLayout
from penstock.planner.schemes.alternating import alternating_orders
from penstock.planner.schemes.base import (
    Recomputation,
    Scheme,
    one_stage_per_device,
    require_one_per_device,
    round_robin,
)
from penstock.protocol.plan.instructions import Backward, Forward, SwapIn, SwapOut


def activation_bound(num_devices: int) -> int:
    """Returns the micro-batches of activations that a device has at most, its own and
    hosted ones.
    """
    return (num_devices + 3) // 2


def _orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    bound = activation_bound(layout.num_devices)
    orders = alternating_orders(layout, recompute)
    return tuple(
        tuple(_balanced(order, device, layout, bound))
        if min(layout.num_devices - device, layout.num_microbatches) > bound
        else order
        for device, order in enumerate(orders)
    )


def _balanced(
    order: Order, device: int, layout: StageLayout, bound: int
) -> Iterator[OrderedInstruction]:
    pair = layout.num_devices - 1 - device
    here = 0
    away: deque[int] = deque()
    for instruction in order:
        yield instruction
        match instruction:
            case Forward(stage=stage, micro_batch=m):
                here += 1
                if here == bound and m + 1 < layout.num_microbatches:
                    yield SwapOut(stage=stage, micro_batch=m, fraction=1.0, peer=pair)
                    here -= 1
                    away.append(m)
            case Backward(stage=stage):
                here -= 1
                if away:
                    yield SwapIn(stage=stage, micro_batch=away.popleft(), fraction=1.0, peer=pair)
                    here += 1


SCHEME = Scheme(
    name="bpipe",
    recompute_modes=("none", "selective"),
    default_stages=one_stage_per_device,
    check_stages=require_one_per_device,
    place=round_robin,
    order=_orders,
)
