"""Mobius: GPipe's order on k stages per device, with weights in host memory.

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", 2023, as
described in section 2.2 of the SPipe paper. Stage i is on device i mod p. A device runs all
forwards of its first stage, of its second stage, …, then the backwards of its last stage, … with
recomputation. Weights of the next stage arrive while the current one computes: two stage-sized
buffers. Each device keeps the input checkpoints of its k stages for all m micro-batches, and the
activations of one. Without full recomputation (figure 17 of the SPipe paper) it keeps the
activations of all k m. Their weights are bound again for the backward.

Let m >= p, and f, r, b be the times per stage and micro-batch (forward, recomputation, backward
without it). The pipeline takes k m (f + r + b) + (p - 1) (f + b): a recomputation does not wait for
the gradient. The usual checkpointing, with which the SPipe paper compares, waits
(``after=gradient``). The end is longer by (p - 1) r, and the bubble is (p - 1) / (k m + p - 1).
With (p, k, m) = (4, 2, 4) that is 27 %.
"""

from __future__ import annotations

from penstock.planner.schedule.layout import Residency
from penstock.planner.schemes.base import (
    Scheme,
    all_forward_all_backward,
    require_same_on_each_device,
    round_robin,
    two_stages_per_device,
)

SCHEME = Scheme(
    name="mobius",
    recompute_modes=("full", "none", "selective"),
    default_stages=two_stages_per_device,
    check_stages=require_same_on_each_device,
    place=round_robin,
    order=all_forward_all_backward,
    residency=Residency.STREAMED,
)
