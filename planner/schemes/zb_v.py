"""ZB-V: two chunks per device in a V, split backward, no bubble where all times are equal.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6 and figure 6.
Stages are placed in a V (:mod:`.v_shape`).

Let f = p1 = p2 = 1 per stage and micro-batch, and m >= 2 p - 1. No device waits between its first
and its last instruction: device time is exactly 6 m. The makespan is 6 m + p - 1, since device d
starts and ends d later than device 0. That is hidden if the next attempt starts as the devices
become free. With unequal times there are bubbles. Fewer micro-batches leave out the instructions of
those that are not there. Each device keeps at most 2 p of its 2 m stage activations (until their
BACKWARD_WEIGHT): p micro-batches, what the first device of 1F1B keeps. Weights stay on their
devices (two buffers).
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.schedule.layout import Order, StageLayout
from penstock.planner.schemes.base import (
    Recomputation,
    Scheme,
    require_two_per_device,
    two_stages_per_device,
    wave,
)
from penstock.planner.schemes.v_shape import Move, order_of_moves

_WHOLE_UP = (Move.INPUT_UP, Move.WEIGHT_UP)
_WHOLE_DOWN = (Move.INPUT_DOWN, Move.WEIGHT_DOWN)


def _orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    # Fewer micro-batches than fill the pipeline leave out those that are not there.
    count = max(layout.num_microbatches, 2 * layout.num_devices - 1)
    return tuple(
        order_of_moves(layout, device, _moves(device, layout.num_devices, count), recompute)
        for device in range(layout.num_devices)
    )


def _moves(device: int, num_devices: int, count: int) -> Iterator[Move]:
    to_last = num_devices - device
    # Fill: down until the first micro-batch comes up, then both ways, then up and back at once.
    yield from [Move.FORWARD_DOWN] * (2 * to_last - 1)
    yield from [Move.FORWARD_UP, Move.FORWARD_DOWN] * device
    yield from [Move.FORWARD_UP, *_WHOLE_UP] * to_last
    # Steady: one forward and one whole backward of each chunk, until all forwards are done.
    downs = count - (2 * num_devices - 1 - device)
    for turn in range(count - num_devices):
        yield from [Move.FORWARD_DOWN] * (turn < downs)
        yield from (*_WHOLE_DOWN, Move.FORWARD_UP, *_WHOLE_UP)
    # Drain: input gradients first, weight gradients fill what would be bubbles.
    yield from [Move.INPUT_DOWN, Move.INPUT_UP] * device
    yield from _WHOLE_DOWN * to_last
    yield from [Move.WEIGHT_UP] * device
    yield from [Move.WEIGHT_DOWN] * device


SCHEME = Scheme(
    name="zb-v",
    recompute_modes=("none", "full", "selective"),
    default_stages=two_stages_per_device,
    check_stages=require_two_per_device,
    place=wave,
    order=_orders,
)
