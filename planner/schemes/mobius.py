"""Mobius: GPipe's order on k stages per device, with weights in host memory.

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", 2023, as
described in section 2.2 of the SPipe paper. Stage i is on device i mod p. A device runs all
forwards of its first stage, of its second stage, …, then the backwards of its last stage, … with
recomputation. Weights of the next stage arrive while the current one computes: two stage-sized
buffers. Each device keeps the input checkpoints of its k stages for all m micro-batches, and the
activations of one.

With m >= p, forward time 1 and backward time b per stage and micro-batch, the pipeline takes k m (1
+ b) + (p - 1) (1 + b), so the bubble is (p - 1) / (k m + p - 1): with (p, k, m) = (4, 2, 4) 27 %.
"""

from __future__ import annotations

from penstock.planner.layout import Residency
from penstock.planner.schemes.base import Complaint, Scheme, all_forward_all_backward, round_robin


def _default_stages(num_devices: int, num_blocks: int, num_forward: int | None) -> tuple[int, int]:
    """Two stages per device, one where blocks are too few."""
    per_device = 2 if 2 * num_devices <= num_blocks else 1
    num_stages = per_device * num_devices if num_forward is None else num_forward
    return num_stages, num_stages


def _check_stages(num_forward: int, num_backward: int, num_devices: int) -> Complaint | None:
    if num_forward % num_devices:
        return "forward_stages", f"a multiple of {num_devices} (the same number on each worker)"
    if num_backward != num_forward:
        return "backward_stages", f"{num_forward} (the same as forward_stages)"
    return None


SCHEME = Scheme(
    name="mobius",
    recompute_modes=("full",),
    default_stages=_default_stages,
    check_stages=_check_stages,
    place=round_robin,
    order=all_forward_all_backward,
    residency=Residency.STREAMED,
)
