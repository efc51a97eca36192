"""How many stage activations each device keeps at most is the bound in each scheme's docstring.

A stage activation is kept from its FORWARD to its BACKWARD, or last BACKWARD_WEIGHT.
"""

from __future__ import annotations

import pytest

from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.layout import Order
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schedule.timing import order_times
from penstock.protocol.plan.instructions import Backward, BackwardWeight, Forward, SwapIn, SwapOut


def build(scheme: str, devices: int, micro_batches: int, stages_per_device: int = 1) -> Schedule:
    """A schedule with one block per stage."""
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=devices,
        num_microbatches=micro_batches,
        stages_per_device=stages_per_device,
    )
    return build_schedule(request, [1.0] * (devices * stages_per_device))


def most_kept(order: Order) -> int:
    """The largest number of stage activations at any time."""
    kept = most = 0
    for instruction in order:
        match instruction:
            case Forward():
                kept += 1
            case Backward():
                kept -= 1
            case BackwardWeight(micro_batches=several):
                kept -= len(several)
        most = max(most, kept)
    assert kept == 0
    return most


def kept(scheme: str, devices: int, micro_batches: int, stages_per_device: int = 1) -> list[int]:
    """Of every device."""
    schedule = build(scheme, devices, micro_batches, stages_per_device)
    return [most_kept(order) for order in schedule.orders]


SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 2), (4, 1), (4, 4), (4, 9), (8, 8), (8, 24)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_one_stage_per_device(p: int, m: int) -> None:
    assert kept("naive", p, m) == [1] * p
    assert kept("gpipe", p, m) == [m] * p
    assert kept("1f1b", p, m) == [min(p - d, m) for d in range(p)]
    assert kept("1f1b-2", p, 2 * p) == [p - d for d in range(p)]
    assert kept("zb-h1", p, m) == [min(p, m)] * p


@pytest.mark.parametrize("scheme", ["interleaved", "megatron-offload"])
@pytest.mark.parametrize(("p", "m", "g"), [(2, 4, 2), (3, 9, 3), (4, 4, 4), (4, 10, 5), (8, 16, 8)])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved(scheme: str, p: int, m: int, g: int, v: int) -> None:
    bounds = [min(v * m, (v - 1) * g + 2 * (p - 1 - d) + 1) for d in range(p)]
    assert kept(scheme, p, m, v) == bounds


def test_interleaved_keeps_what_the_mario_paper_says() -> None:
    """Table 1: from D + 1 on; to 3 D - 2, where the forward before the first backward is left out.

    Both in halves of a device's share.
    """
    found = kept("interleaved", 8, 32, 2)
    assert (min(found), max(found)) == (8 + 1, 3 * 8 - 2 + 1)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
@pytest.mark.parametrize("units", [1, 3])
def test_chimera(p: int, units: int) -> None:
    """Table 1 of the Mario paper: from D / 2 + 1 to D."""
    found = kept("chimera", p, units * p)
    assert found == [p // 2 + 1 + min(d, p - 1 - d) for d in range(p)]
    assert (min(found), max(found)) == (p // 2 + 1, p)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("units", [1, 3])
def test_hanayo(p: int, units: int) -> None:
    """Table 1 of the Mario paper: from (D + 1) / 2 to D micro-batches, two stages each."""
    for v in (2, 4):
        assert kept("hanayo", p, units * p, v) == [(v - 1) * p + 1 + d for d in range(p)]
    found = kept("hanayo", p, units * p, 2)
    assert (min(found), max(found)) == (p + 1, 2 * p)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zero_bubble_schemes(p: int) -> None:
    assert kept("zb-h1", p, 3 * p, 2) == [2 * p] * p
    assert kept("zb-v", p, 3 * p, 2) == [2 * p] * p
    assert kept("dualpipe-v", p, 3 * p, 2) == [2 * p + 1] * p


@pytest.mark.parametrize(("p", "m"), [*SIZES, (5, 12), (7, 7), (16, 40)])
def test_bpipe(p: int, m: int) -> None:
    """Its own and hosted micro-batches together, at any time: ceil((p + 2) / 2)."""
    schedule = build("bpipe", p, m)
    bound = -(-(p + 2) // 2)
    most = most_with_hosted(schedule)
    assert max(most) <= bound
    if m >= p >= 2:
        assert max(most) == min(bound, p)


def most_with_hosted(schedule: Schedule) -> list[int]:
    """Swaps move at once, when the instruction before them has ended."""
    block = BlockCost(forward_s=1, backward_input_s=1, backward_weight_s=1)
    costs = Costs(blocks=(block,) * schedule.layout.num_blocks)
    times = order_times(schedule.layout, schedule.orders, costs)
    events: list[tuple[float, int, int, int]] = []
    for device, order in enumerate(schedule.orders):
        for position, instruction in enumerate(order):
            # What comes at the same time: first what frees memory, on whichever device.
            start, end = times.starts[device][position], times.ends[device][position]
            match instruction:
                case Forward():
                    events.append((start, 1, device, 1))
                case Backward():
                    events.append((end, 0, device, -1))
                case SwapOut(peer=int(peer)):
                    events += [(end, 0, device, -1), (end, 1, peer, 1)]
                case SwapIn(peer=int(peer)):
                    events += [(end, 0, peer, -1), (end, 1, device, 1)]
    held = [0] * len(schedule.orders)
    most = [0] * len(schedule.orders)
    for _, _, device, change in sorted(events):
        held[device] += change
        most[device] = max(most[device], held[device])
    assert held == [0] * len(held)
    return most


def test_offloading_schemes() -> None:
    """Input checkpoints of k stages for all micro-batches; of one micro-batch in ZeRO-3."""
    assert kept("mobius", 4, 6, 3) == [18] * 4
    assert kept("zero3-offload", 4, 8, 3) == [3] * 4


@pytest.mark.parametrize(
    ("scheme", "stages_per_device", "buffers"),
    [
        ("1f1b", 1, 2),
        ("interleaved", 3, 3),
        ("chimera", 1, 2),
        ("hanayo", 4, 4),
        ("zb-v", 2, 2),
        ("mobius", 3, 2),
        ("megatron-offload", 3, 2),
        ("zero3-offload", 3, 2),
    ],
)
def test_weight_buffers(scheme: str, stages_per_device: int, buffers: int) -> None:
    """One per stage where weights stay (never fewer than two are reserved), else two."""
    assert lower(build(scheme, 4, 4, stages_per_device)).weight_buffers == buffers
