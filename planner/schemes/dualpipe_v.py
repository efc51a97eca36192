"""DualPipeV: DualPipe's order on two chunks per device in a V, without a second copy of the model.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 (DualPipe), and the
DualPipeV order published with its code. Stages are placed in a V (:mod:`.v_shape`).

In the steady phase DualPipe runs a forward of one chunk and a backward of the other at once. The
communication of either hides behind the other. A program here is one stream: the forward stands
first, the backward right behind it. The published bubble is (p - 1) (F&B + B - 3 W) with B = p1 +
p2. It counts such a pair as one block F&B; the results of the block leave at its end. One after the
other, the forward's output leaves earlier. With f = p1 = p2 per stage and micro-batch the bubble is
(p - 1) (f + p1 - p2). Needs 2 p micro-batches. Each device keeps at most 2 p + 1 of its 2 m stage
activations, as published. Weights stay on their devices (two buffers).
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


def _orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    return tuple(
        order_of_moves(
            layout,
            device,
            _moves(device, layout.num_devices, layout.num_microbatches),
            recompute,
        )
        for device in range(layout.num_devices)
    )


def _moves(device: int, num_devices: int, count: int) -> Iterator[Move]:
    after = num_devices - 1 - device
    # Fill: forwards down, both ways, then weight gradients between the first backwards.
    yield from [Move.FORWARD_DOWN] * (2 * after)
    yield from [Move.FORWARD_DOWN, Move.FORWARD_UP] * (device + 1)
    yield from [Move.INPUT_UP, Move.OLDEST_WEIGHT, Move.FORWARD_UP] * after
    # Steady: forwards of one chunk in pairs with backwards of the other.
    yield from (
        [Move.FORWARD_DOWN, Move.BACKWARD_UP, Move.FORWARD_UP, Move.BACKWARD_DOWN]
        * (count - 2 * num_devices + device + 1)
    )
    # Drain: split the second half of the last backwards, so that input gradients hurry on.
    yield from [Move.BACKWARD_UP, Move.FORWARD_UP, Move.BACKWARD_DOWN] * after
    for turn in range(device + 1):
        split = 2 * turn > device
        yield Move.INPUT_UP if split else Move.BACKWARD_UP
        split = 2 * turn + 1 > device
        yield Move.INPUT_DOWN if split else Move.BACKWARD_DOWN
    yield from [Move.OLDEST_WEIGHT, Move.INPUT_DOWN] * after
    yield from [Move.OLDEST_WEIGHT] * (device + 1)


def _enough(num_microbatches: int, num_devices: int, num_forward: int) -> str | None:
    del num_forward
    if num_microbatches < 2 * num_devices:
        return f"{2 * num_devices} or more (two per worker)"
    return None


SCHEME = Scheme(
    name="dualpipe-v",
    recompute_modes=("none", "full", "selective"),
    default_stages=two_stages_per_device,
    check_stages=require_two_per_device,
    check_microbatches=_enough,
    place=wave,
    order=_orders,
)
