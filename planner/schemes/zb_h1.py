"""ZB-H1: 1F1B with split backward, within the memory of 1F1B.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.1.1 and table 2. Device d
runs the BACKWARD_WEIGHT of a micro-batch d backwards later than its BACKWARD_INPUT, and the last d
of them at the end.

Let m >= p, and p2 <= f, p2 <= p1 per micro-batch and device. The bubble takes (p - 1) (f + p1 -
p2), for equal times a third of 1F1B's (p - 1) (f + p1 + p2). Each device keeps at most min(p, m)
micro-batches (until their BACKWARD_WEIGHT): what the first device of 1F1B keeps. Weights stay on
their devices (one buffer).

With several stages per device it is the interleaved form, "interleaved zero bubble" (ZB1P) in
torch.distributed.pipelining. It has the rounds of :mod:`.interleaved`, with a lead of one forward
per device instead of two. With V stages per device the bubble is 1/V of the above, and each device
keeps at most V p stage activations.
"""

from __future__ import annotations

from functools import partial

from penstock.planner.schemes.alternating import alternating_orders, equal_rounds
from penstock.planner.schemes.base import (
    Scheme,
    one_stage_per_device,
    require_same_on_each_device,
    round_robin,
)

SCHEME = Scheme(
    name="zb-h1",
    recompute_modes=("none", "full", "selective"),
    default_stages=one_stage_per_device,
    check_stages=require_same_on_each_device,
    check_microbatches=equal_rounds,
    place=round_robin,
    order=partial(alternating_orders, split=True),
)
