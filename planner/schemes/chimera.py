"""Chimera: two pipelines in opposite directions on the same devices, "X" for its shape.

Source: Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with
Bidirectional Pipelines", 2021, section 3. Stage i of the down pipeline (route 0) is on device i.
Stage i of the up pipeline (route 1) is on device p - 1 - i. Every device has two stages, and the
weights of each stage are on two devices. Micro-batches alternate between the routes. With m = p the
orders are the paper's merge of two 1F1B schedules. More are scheduled in units of p by direct
concatenation (section 3.5).

With equal forward and backward times 1 and m a multiple of p the makespan is 2 m + p - 2. The
bubble ratio is (p - 2) / (2 m + p - 2) (table 2 of the paper). With b > f there is a gap in each of
the K = m / p units. The bubble takes (p - 2) (f + K (b - f)). One unit takes p f + (2 p - 2) b (C_f
and C_b of section 3.4). Device d keeps at most p / 2 + 1 + min(d, p - 1 - d) micro-batches of
activations. That is from p / 2 + 1 to p, as in table 1 of the Mario paper. Weights stay on their
devices (two buffers).
"""

from __future__ import annotations

from penstock.planner.schedule.layout import Order, StageLayout
from penstock.planner.schemes.base import (
    Recomputation,
    Scheme,
    StageDevices,
    one_stage_per_device,
    require_one_per_device,
)
from penstock.planner.schemes.timetable import timetable_orders


def _even_devices(num_devices: int) -> str | None:
    return None if num_devices % 2 == 0 else "an even number of workers"


def _even_microbatches(num_microbatches: int, num_devices: int, num_forward: int) -> str | None:
    del num_devices, num_forward
    return None if num_microbatches % 2 == 0 else "an even number (half in each direction)"


def _both_directions(num_forward: int, num_backward: int, num_devices: int) -> StageDevices:
    del num_devices
    return StageDevices(
        forward=(*range(num_forward), *reversed(range(num_forward))),
        backward=(*range(num_backward), *reversed(range(num_backward))),
    )


def _alternate(num_microbatches: int, num_devices: int) -> tuple[int, ...]:
    del num_devices
    return tuple(m % 2 for m in range(num_microbatches))


def _orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    return timetable_orders(layout, recompute, microbatches_per_unit=layout.num_devices // 2)


SCHEME = Scheme(
    name="chimera",
    recompute_modes=("none", "full", "selective"),
    default_stages=one_stage_per_device,
    check_stages=require_one_per_device,
    check_devices=_even_devices,
    check_microbatches=_even_microbatches,
    place=_both_directions,
    routes=_alternate,
    order=_orders,
)
