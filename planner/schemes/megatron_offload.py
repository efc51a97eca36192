"""Megatron-offload: interleaved 1F1B with weights in host memory.

Source: the offloading-extended Megatron of the SPipe paper, section 4.1. The order is that of
:mod:`.interleaved`, with V stages per device (the paper runs two) and recomputation. Weights of the
next stage arrive while the current one computes: two stage-sized buffers. With V = 2 both stages of
a device stay in them and are fetched once. With more, forwards and backwards alternate between
stages, and a displaced stage is fetched again. That makes more copies than Mobius, which fetches
each stage once per direction.

Bubble and buffer bound in stage activations are those of :mod:`.interleaved`; with full
recomputation they are input checkpoints, and the activations of one stage. Without it weights are
bound again for the backward.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.schedule.layout import Residency
from penstock.planner.schemes import interleaved

SCHEME = replace(
    interleaved.SCHEME,
    name="megatron-offload",
    recompute_modes=("full", "none", "selective"),
    residency=Residency.STREAMED,
)
