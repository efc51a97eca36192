"""Hanayo: stages placed in waves, down the devices and up again.

Source: Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model
Training Efficiency", 2023. A wave is 2 p stages, so W waves put V = 2 W stages on each device. They
are both directions of Chimera, without the second copy of the weights. Units of p micro-batches.

Let forward and backward take f per micro-batch and device, and m be a multiple of p. The bubble
takes 2 f (p - 1) / V, as that of interleaved 1F1B. For b > f there is a gap in each of the K = m /
p units: (2 f + 2 K (b - f)) (p - 1) / V. For m = p, b = 2 f the bubble ratio is (2 p - 2) / (3 p W
+ 2 p - 2). Device d keeps at most (V - 1) p + 1 + d of its V m stage activations. For W = 1 that is
from p + 1 to 2 p of them. In micro-batches that is (p + 1) / 2 to p, as in table 1 of the Mario
paper. Weights stay on their devices (V buffers).
"""

from __future__ import annotations

from penstock.planner.schedule.layout import Order, StageLayout
from penstock.planner.schemes.base import (
    Complaint,
    Recomputation,
    Scheme,
    require_as_many_backward,
    wave,
)
from penstock.planner.schemes.timetable import timetable_orders


def _one_wave(num_devices: int, num_blocks: int, num_forward: int | None) -> tuple[int, int]:
    del num_blocks
    num_stages = 2 * num_devices if num_forward is None else num_forward
    return num_stages, num_stages


def _whole_waves(num_forward: int, num_backward: int, num_devices: int) -> Complaint | None:
    if num_forward % (2 * num_devices):
        return "forward_stages", f"a multiple of {2 * num_devices} (whole waves)"
    return require_as_many_backward(num_forward, num_backward)


def _orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    return timetable_orders(layout, recompute, microbatches_per_unit=layout.num_devices)


SCHEME = Scheme(
    name="hanayo",
    recompute_modes=("none", "full", "selective"),
    default_stages=_one_wave,
    check_stages=_whole_waves,
    place=wave,
    order=_orders,
)
