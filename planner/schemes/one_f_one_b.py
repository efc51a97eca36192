"""1F1B: after a warm-up each device alternates one forward and one backward, one stage per device.

Source: Fan et al., "DAPPLE", 2021; Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
Training", 2021. Device d of p starts with min(p - 1 - d, m) forwards. The bubble is that of GPipe,
(p - 1) / (m + p - 1). Device d keeps at most min(p - d, m) micro-batches only. Its weights stay on
the device (one buffer).

``1f1b-2`` is the same with exactly 2 p micro-batches (2BP paper, section 3: "1F1B-2"; its "1F1B-1"
is 1F1B with p). Its bubble is (p - 1) / (3 p - 1).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.schemes.alternating import alternating_orders
from penstock.planner.schemes.base import (
    Scheme,
    one_stage_per_device,
    require_one_per_device,
    round_robin,
)

SCHEME = Scheme(
    name="1f1b",
    recompute_modes=("none", "full", "selective"),
    default_stages=one_stage_per_device,
    check_stages=require_one_per_device,
    place=round_robin,
    order=alternating_orders,
)


def _twice_as_many(num_microbatches: int, num_devices: int, num_forward: int) -> str | None:
    del num_forward
    if num_microbatches != 2 * num_devices:
        return f"{2 * num_devices} (two per worker); 1f1b accepts any number"
    return None


SCHEME_2 = replace(SCHEME, name="1f1b-2", check_microbatches=_twice_as_many)
