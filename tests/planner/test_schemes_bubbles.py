"""The bubble of every scheme is the formula in its docstring, exactly, for many sizes.

Bubble: the makespan without what a device computes, in times of
:mod:`penstock.planner.schedule.timing`.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import OrderTimes, order_times
from penstock.planner.schemes import RecomputeMode
from penstock.protocol.plan.instructions import RecomputeAfter

UNIT = (1, 1, 1)
"""Seconds of forward, p1 and p2 of a stage; its whole backward takes 2."""
TIMES = (UNIT, (2, 1, 1), (3, 1, 2))


def build(
    scheme: str,
    devices: int,
    micro_batches: int,
    stages_per_device: int = 1,
    recompute: RecomputeMode | None = None,
    recompute_after: RecomputeAfter = RecomputeAfter.CHECKPOINT,
) -> Schedule:
    """A schedule with one block per stage."""
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=devices,
        num_microbatches=micro_batches,
        stages_per_device=stages_per_device,
        recompute=recompute,
        recompute_after=recompute_after,
    )
    return build_schedule(request, [1.0] * (devices * stages_per_device))


def times_of(schedule: Schedule, times: tuple[float, float, float] = UNIT) -> OrderTimes:
    """Recomputation takes as long as the forward."""
    forward, p1, p2 = times
    block = BlockCost(
        forward_s=forward, recompute_s=forward, backward_input_s=p1, backward_weight_s=p2
    )
    costs = Costs(blocks=(block,) * schedule.layout.num_blocks)
    return order_times(schedule.layout, schedule.orders, costs)


def bubble(schedule: Schedule, times: tuple[float, float, float] = UNIT) -> float:
    """Seconds that every device idles; all are equally busy in these schemes."""
    spent = times_of(schedule, times)
    busy = {
        sum(end - start for start, end in zip(starts, ends, strict=True))
        for starts, ends in zip(spent.starts, spent.ends, strict=True)
    }
    assert len(busy) == 1
    return spent.makespan_s - busy.pop()


def ratio(schedule: Schedule, times: tuple[float, float, float] = UNIT) -> Fraction:
    """Share of the makespan."""
    return Fraction(bubble(schedule, times)) / Fraction(times_of(schedule, times).makespan_s)


SIZES = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (4, 4), (4, 8), (5, 7), (8, 8), (8, 20), (16, 16)]
"""Devices and at least as many micro-batches."""


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 1), (8, 3)])
def test_naive_is_one_device_at_a_time(p: int, m: int) -> None:
    assert ratio(build("naive", p, m)) == Fraction(p - 1, p)


@pytest.mark.parametrize("scheme", ["gpipe", "1f1b", "bpipe"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_1f1b_and_bpipe(scheme: str, p: int, m: int) -> None:
    for f, p1, p2 in TIMES:
        assert bubble(build(scheme, p, m), (f, p1, p2)) == (p - 1) * (f + p1 + p2)
    assert ratio(build(scheme, p, m)) == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_table_1_of_2bp_without_2bp(p: int) -> None:
    assert ratio(build("naive", p, 1)) == Fraction(p - 1, p)
    assert ratio(build("gpipe", p, p)) == Fraction(p - 1, 2 * p - 1)
    assert ratio(build("1f1b", p, p)) == Fraction(p - 1, 2 * p - 1)
    assert ratio(build("1f1b-2", p, 2 * p)) == Fraction(p - 1, 3 * p - 1)


@pytest.mark.parametrize("scheme", ["interleaved", "megatron-offload"])
@pytest.mark.parametrize("stages_per_device", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 6), (4, 4), (4, 6), (4, 10), (4, 16), (8, 8)])
def test_interleaved_divides_the_bubble(
    scheme: str, stages_per_device: int, p: int, m: int
) -> None:
    """(p - 1) (f + b) / V, where f and b are V stages' times."""
    schedule = build(scheme, p, m, stages_per_device, "none")
    for f, p1, p2 in TIMES:
        assert bubble(schedule, (f, p1, p2)) == (p - 1) * (f + p1 + p2)
    assert ratio(schedule) == Fraction(p - 1, stages_per_device * m + p - 1)


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_chimera(p: int, units: int) -> None:
    schedule = build("chimera", p, units * p)
    for f, half in ((1.0, 0.5), (2.0, 1.0), (1.0, 1.0), (1.0, 2.0)):
        b = 2 * half
        assert bubble(schedule, (f, half, half)) == (p - 2) * (f + units * (b - f))
    assert ratio(schedule, (2, 1, 1)) == Fraction(p - 2, 2 * units * p + p - 2)


def test_chimera_of_four() -> None:
    """Figure 3 of the paper: 10 slots, 2 of them empty; with b = 2 f, C_f = 4 and C_b = 6."""
    schedule = build("chimera", 4, 4)
    assert times_of(schedule, (1, 0.5, 0.5)).makespan_s == 10
    assert bubble(schedule, (1, 0.5, 0.5)) == 2
    assert times_of(schedule).makespan_s == 4 * 1 + 6 * 2


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_hanayo(p: int, waves: int, units: int) -> None:
    """(2 f + 2 K (b - f)) (p - 1) / V, where f and b are V stages' times."""
    schedule = build("hanayo", p, units * p, 2 * waves)
    for f, half in ((1.0, 0.5), (1.0, 1.0), (1.0, 2.0)):
        assert bubble(schedule, (f, half, half)) == (2 * f + 2 * units * (2 * half - f)) * (p - 1)
    if units == 1:
        assert ratio(schedule) == Fraction(2 * p - 2, 3 * p * waves + 2 * p - 2)


ZERO_BUBBLE_TIMES = [UNIT, (2, 1, 1), (2, 2, 1), (3, 2, 2), (2, 3, 1)]


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (3, 3), (4, 4), (4, 12), (8, 8), (8, 16)])
@pytest.mark.parametrize("stages_per_device", [1, 2, 3])
def test_zb_h1_has_a_third_of_the_bubble(p: int, m: int, stages_per_device: int) -> None:
    """(p - 1) (f + p1 - p2) with p2 <= f, p1."""
    schedule = build("zb-h1", p, m, stages_per_device)
    for f, p1, p2 in ZERO_BUBBLE_TIMES:
        assert bubble(schedule, (f, p1, p2)) == (p - 1) * (f + p1 - p2)
    assert 3 * bubble(schedule) == bubble(build("1f1b", p, m))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("further", [0, 1, 9])
def test_zb_v_has_no_bubble(p: int, further: int) -> None:
    """Every device computes without a pause from its first to its last instruction."""
    m = 2 * p - 1 + further
    spent = times_of(build("zb-v", p, m, 2))
    spans = [ends[-1] - starts[0] for starts, ends in zip(spent.starts, spent.ends, strict=True)]
    assert spans == [6 * m] * p
    assert [starts[0] for starts in spent.starts] == list(range(p))
    assert spent.makespan_s == 6 * m + p - 1


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("further", [0, 1, 9])
def test_dualpipe_v(p: int, further: int) -> None:
    """One stream: (p - 1) (f + p1 - p2) for equal times; published with overlap: p - 1 times (F&B +
    B - 3 W), which counts a pair as one block.
    """
    f, p1, p2 = UNIT
    found = bubble(build("dualpipe-v", p, 2 * p + further, 2))
    assert found == (p - 1) * (f + p1 - p2)
    both = f + p1 + p2
    assert found <= (p - 1) * (both + (p1 + p2) - 3 * p2)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("stages_per_device", [1, 2, 3])
def test_mobius(p: int, stages_per_device: int) -> None:
    """k m (f + r + b) + (p - 1) (f + b), and (p - 1) r more where recomputation comes late."""
    k, m = stages_per_device, 2 * p
    f, p1, p2 = times = (3, 1, 2)
    kept = build("mobius", p, m, k, "none")
    assert ratio(kept, times) == Fraction(p - 1, k * m + p - 1)
    early = build("mobius", p, m, k, "full")
    assert times_of(early, times).makespan_s == k * m * (f + f + p1 + p2) + (p - 1) * (f + p1 + p2)
    late = build("mobius", p, m, k, "full", RecomputeAfter.GRADIENT)
    assert bubble(late, times) == bubble(early, times) + (p - 1) * f
    assert ratio(late, times) == Fraction(p - 1, k * m + p - 1)


def test_mobius_of_the_spipe_paper() -> None:
    """4 devices, 4 micro-batches, 2 stages per device, f = b = r = 1: 33 units."""
    late = build("mobius", 4, 4, 2, "full", RecomputeAfter.GRADIENT)
    assert times_of(late, (1, 0.5, 0.5)).makespan_s == 33
    assert ratio(late, (1, 0.5, 0.5)) == Fraction(9, 33)


def test_spipe_has_no_bubble_between_forward_and_backward() -> None:
    """Figure 8: 4 devices, 4 micro-batches, 8 forward and 16 backward stages of two blocks or one.

    A forward stage's share of blocks takes 1 in each of f, p1 + p2 and r: 27 units, 3 of them
    bubbles.
    """
    request = ScheduleRequest(
        scheme="spipe",
        num_devices=4,
        num_microbatches=4,
        forward_stages=8,
        backward_stages=16,
    )
    schedule = build_schedule(request, [1.0] * 16)
    assert times_of(schedule, (0.5, 0.25, 0.25)).makespan_s == 27
    assert ratio(schedule, (0.5, 0.25, 0.25)) == Fraction(3, 27)


@pytest.mark.parametrize("p", [1, 2, 5])
def test_zero3_devices_do_not_wait_for_each_other(p: int) -> None:
    request = ScheduleRequest(scheme="zero3-offload", num_devices=p, num_microbatches=2 * p)
    assert bubble(build_schedule(request, [1.0] * 4)) == 0
