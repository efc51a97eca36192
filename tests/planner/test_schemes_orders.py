"""The compute order of every scheme for a small case, whole: golden/orders/*.txt.

A grid with one column per device. After a deliberate change, write ``grid_of(name)`` of each case
to its file, and read the difference before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import lower
from penstock.planner.schemes import SCHEMES
from penstock.planner.validate.check import program_grid, validate
from penstock.protocol.plan.plan import Plan

GOLDEN = Path(__file__).parent / "golden" / "orders"

CASES: dict[str, dict[str, Any]] = {
    "naive": {"num_devices": 3, "num_microbatches": 2},
    "gpipe": {"num_devices": 3, "num_microbatches": 3},
    "1f1b": {"num_devices": 4, "num_microbatches": 6},
    "1f1b-2": {"num_devices": 3, "num_microbatches": 6},
    "interleaved": {"num_devices": 3, "num_microbatches": 6},
    "chimera": {"num_devices": 4, "num_microbatches": 8},
    "hanayo": {"num_devices": 3, "num_microbatches": 3},
    "zb-h1": {"num_devices": 4, "num_microbatches": 5},
    "zb-v": {"num_devices": 3, "num_microbatches": 6},
    "dualpipe-v": {"num_devices": 3, "num_microbatches": 7},
    "bpipe": {"num_devices": 6, "num_microbatches": 8},
    "mobius": {"num_devices": 3, "num_microbatches": 3},
    "megatron-offload": {"num_devices": 2, "num_microbatches": 4, "stages_per_device": 3},
    "spipe": {"num_devices": 3, "num_microbatches": 2, "backward_stages": 12},
    "zero3-offload": {"num_devices": 2, "num_microbatches": 4, "stages_per_device": 3},
}


def grid_of(name: str) -> str:
    """Stages, then the orders of all devices."""
    schedule = build_schedule(ScheduleRequest(scheme=name, **CASES[name]), [1.0] * 12)
    layout = schedule.layout
    lines = [
        f"forward stages on devices {' '.join(str(s.device) for s in layout.forward)}",
        f"backward stages on devices {' '.join(str(s.device) for s in layout.backward)}",
        f"routes of micro-batches {' '.join(map(str, layout.routes))}" if layout.routes else "",
        program_grid(schedule.orders),
    ]
    return "\n".join(line for line in lines if line)


def test_every_scheme_has_a_case() -> None:
    assert set(CASES) == set(SCHEMES)


@pytest.mark.parametrize("name", CASES)
def test_orders(name: str) -> None:
    assert grid_of(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_every_combination_that_is_accepted_trains(
    name: str, num_devices: int, execute: Callable[[Plan], None]
) -> None:
    """Micro-batches, stages per device, recomputation; evaluation programs are checked as well.

    A reference executor gets the gradients of training on one device.
    """
    accepted = 0
    modes = SCHEMES[name].recompute_modes
    for mode in modes if num_devices == 4 else modes[:1]:
        for num_microbatches, stages_per_device in (
            *((m, v) for m in (1, 3, 8) for v in (None, 2)),
            (num_devices, 4),
            (2 * num_devices, None),
            (3 * num_devices, 3),
        ):
            request = ScheduleRequest(
                scheme=name,
                num_devices=num_devices,
                num_microbatches=num_microbatches,
                stages_per_device=stages_per_device,
                recompute=mode,
                drop=("norm",) if mode == "selective" else (),
            )
            try:
                schedule = build_schedule(request, [1.0] * 16)
            except ConfigError:
                continue
            plan = lower(schedule)
            validate(plan)
            execute(plan)
            accepted += 1
    assert accepted or (name == "chimera" and num_devices % 2)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            {"scheme": "chimera", "num_devices": 3, "num_microbatches": 6},
            r"cluster\.workers: 3 workers in all; chimera accepts an even number of workers",
        ),
        (
            {"scheme": "chimera", "num_devices": 4, "num_microbatches": 5},
            r"= 5 micro-batches: chimera with 4 workers accepts an even number \(half in each dir",
        ),
        (
            {"scheme": "1f1b-2", "num_devices": 4, "num_microbatches": 4},
            r"= 4 micro-batches: 1f1b-2 with 4 workers accepts 8 \(two per worker\); 1f1b accepts",
        ),
        (
            {"scheme": "interleaved", "num_devices": 4, "num_microbatches": 9},
            r"accepts equal rounds of 4 micro-batches or a few more; the nearest are 8 and 10",
        ),
        (
            {"scheme": "dualpipe-v", "num_devices": 4, "num_microbatches": 7},
            r"= 7 micro-batches: dualpipe-v with 4 workers accepts 8 or more \(two per worker\)",
        ),
        (
            {"scheme": "zero3-offload", "num_devices": 4, "num_microbatches": 6},
            r"= 6 micro-batches: zero3-offload with 4 workers accepts a multiple of 4",
        ),
        (
            {"scheme": "interleaved", "num_devices": 4, "forward_stages": 6},
            r"schedule\.forward_stages = 6: interleaved .* accepts a multiple of 4",
        ),
        (
            {"scheme": "hanayo", "num_devices": 4, "stages_per_device": 3},
            r"forward_stages = 12 \(3 per worker\): hanayo .* accepts a multiple of 8 \(whole wav",
        ),
        (
            {"scheme": "1f1b", "num_devices": 4, "stages_per_device": 2},
            r"forward_stages = 8 \(2 per worker\): 1f1b .* accepts 4 \(one per worker\)",
        ),
        (
            {"scheme": "zb-v", "num_devices": 4, "stages_per_device": 1},
            r"forward_stages = 4 \(1 per worker\): zb-v .* accepts 8 \(two per worker\)",
        ),
        (
            {"scheme": "mobius", "num_devices": 4, "stages_per_device": 7},
            r"forward_stages = 28 \(7 per worker\): more stages than blocks; .* at most 24",
        ),
        (
            {"scheme": "mobius", "stages_per_device": 3, "forward_stages": 8},
            r"stages_per_device = 3: gives 12 forward stages, but .*forward_stages = 8; give one",
        ),
        (
            {"scheme": "mobius", "stages_per_device": 0},
            r"stages_per_device = 0: expected 1 or more",
        ),
        (
            {"scheme": "bpipe", "recompute": "full"},
            r"schedule\.recompute = 'full': bpipe .* accepted: none, selective",
        ),
        (
            {"scheme": "spipe", "recompute": "none"},
            r"'none': spipe runs forward and backward of a block on different .* accepted: full",
        ),
        (
            {"scheme": "1f1b", "recompute": "selective"},
            r"'selective': needs operators to drop",
        ),
        (
            {"scheme": "1f1b", "recompute": "full", "drop": ("norm",)},
            r"schedule\.recompute = 'full': operators to drop \(norm\) need 'selective'",
        ),
        ({"scheme": "gpipe", "num_devices": 25}, r"25 workers in all for 24 blocks; at most 24"),
        ({"scheme": "shuffle"}, r"schedule\.scheme = 'shuffle': unknown scheme; accepted: naive,"),
    ],
)
def test_impossible_combinations(request_: dict[str, Any], message: str) -> None:
    arguments = {"num_devices": 4, "num_microbatches": 8} | request_
    with pytest.raises(ConfigError, match=message):
        build_schedule(ScheduleRequest(**arguments), [1.0] * 24)


def test_more_replicas_than_blocks() -> None:
    """Data parallelism gives every device the whole model, so it may have more devices."""
    request = ScheduleRequest(scheme="zero3-offload", num_devices=5, num_microbatches=5)
    schedule = build_schedule(request, [1.0, 1.0])
    assert len(schedule.layout.forward) == 5 * 2
    assert (schedule.shards_weights, schedule.reduces_gradients) == (True, True)
