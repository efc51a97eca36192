"""GPipe: all forwards, then all backwards, one stage per device.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019. With p devices, m micro-batches and equal stages the bubble is (p - 1) / (m + p
- 1) of the pipeline's time. Each device keeps m micro-batches: their activations, or with
``recompute: full`` their input checkpoints and the activations of one. Its weights stay on the
device for the whole attempt (one buffer).
"""

from __future__ import annotations

from penstock.planner.schemes.base import (
    Scheme,
    all_forward_all_backward,
    one_stage_per_device,
    require_one_per_device,
    round_robin,
)

SCHEME = Scheme(
    name="gpipe",
    recompute_modes=("none", "full", "selective"),
    default_stages=one_stage_per_device,
    check_stages=require_one_per_device,
    place=round_robin,
    order=all_forward_all_backward,
)
