"""Interleaved 1F1B: V stages ("chunks") per device, "W" for its shape.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021, section 2.2. Stage i is on device i mod p. A round has g micro-batches
(:mod:`.alternating`; p if m is a multiple of p). Device d starts with 2 (p - 1 - d) + (V - 1) g
forwards. With one chunk per device it is 1F1B.

Let m >= p, and f and b be the forward and backward time per micro-batch and *device*. The bubble
takes (p - 1) (f + b) / V. Its ratio is (p - 1) / (V m + p - 1). Device d keeps at most (V - 1) g +
2 (p - 1 - d) + 1 of its V m stage activations. Each is 1/V of a device's share. For V = 2 and g = p
that is from p + 1 (last device) to 3 p - 1 (first). Table 1 of the Mario paper has 3 p - 2 for the
first. It does not count the forward right before the first backward. Weights stay on their devices
(V buffers).
"""

from __future__ import annotations

from penstock.planner.schedule.layout import Order, StageLayout
from penstock.planner.schemes.alternating import alternating_orders, equal_rounds
from penstock.planner.schemes.base import (
    Recomputation,
    Scheme,
    require_same_on_each_device,
    round_robin,
    two_stages_per_device,
)


def interleaved_orders(layout: StageLayout, recompute: Recomputation) -> tuple[Order, ...]:
    """Returns orders with a lead of two forwards per device: the gradient of a chunk comes back a
    round later.
    """
    lead = 1 if len(layout.forward) == layout.num_devices else 2
    return alternating_orders(layout, recompute, lead=lead)


SCHEME = Scheme(
    name="interleaved",
    recompute_modes=("none", "full", "selective"),
    default_stages=two_stages_per_device,
    check_stages=require_same_on_each_device,
    check_microbatches=equal_rounds,
    place=round_robin,
    order=interleaved_orders,
)
