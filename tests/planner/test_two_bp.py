"""2BP's passes: table 1 exactly, figure 5, memory limits; every scheme valid and never slower."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.two_bp import theory as paper
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.passes import PASSES
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.schedule.layout import Residency
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schedule.timing import seconds_of
from penstock.planner.schemes import SCHEMES
from penstock.planner.validate.check import validate
from penstock.protocol.plan.resources import PlanFacts
from tests.planner.passing import schedule_for, seconds_after_each, text


def context_of(
    schedule: Schedule,
    *,
    p1: float = 1.0,
    p2: float = 1.0,
    overhead: float = 0.0,
    deferred: float = 0.5,
    memory: float | None = None,
) -> PassContext:
    """A device's share of the model takes 1 forward, and keeps 1 byte of a micro-batch."""
    share = schedule.layout.num_devices / schedule.layout.num_blocks
    block = BlockCost(
        forward_s=share,
        recompute_s=share,
        backward_input_s=share * p1,
        backward_weight_s=share * p2,
        activation_bytes=share,
        deferred_bytes=share * deferred,
    )
    return PassContext(
        costs=Costs(blocks=(block,) * schedule.layout.num_blocks, instruction_s=overhead),
        cluster=Cluster(devices_per_node=4),
        memory_limit_bytes=memory,
    )


def apply(names: str, schedule: Schedule, context: PassContext) -> Schedule:
    for name in names.split(","):
        schedule = PASSES[name].run(schedule, context)
    return schedule


def bubble_ratio(schedule: Schedule, context: PassContext) -> Fraction:
    """Idle time of all devices as a share of the makespan; exact for whole numbers."""
    seconds = seconds_of(PlanFacts.of(schedule.layout, schedule.orders), context.costs)
    busy = sum(Fraction(seconds(i)) for order in schedule.orders for i in order)
    return 1 - busy / (schedule.layout.num_devices * Fraction(makespan_s(schedule, context)))


@pytest.mark.parametrize("n", range(2, 17))
def test_bubble_ratios_of_table_1(n: int) -> None:
    found: dict[str, tuple[Fraction, Fraction]] = {}
    for scheme, micro_batches in (("naive", 1), ("gpipe", n), ("1f1b", n), ("1f1b-2", 2 * n)):
        schedule = schedule_for(scheme, n, micro_batches, blocks=n)
        context = context_of(schedule)
        split = apply("2bp", schedule, context)
        found[scheme] = (bubble_ratio(schedule, context), bubble_ratio(split, context))
    assert found == {
        "naive": (Fraction(n - 1, n), Fraction(2 * (n - 1), 2 * n + 1)),
        "gpipe": (Fraction(n - 1, 2 * n - 1), Fraction(2 * (n - 1), 2 * (n - 1) + 3 * n)),
        "1f1b": (Fraction(n - 1, 2 * n - 1), Fraction(n - 1, n - 1 + 3 * n)),
        "1f1b-2": (Fraction(n - 1, 3 * n - 1), Fraction(n - 1, n - 1 + 6 * n)),
    }


def test_what_each_pass_does_to_a_device() -> None:
    schedule = schedule_for("1f1b", 3, 3)
    context = context_of(schedule)
    split = apply("split-backward", schedule, context)
    assert text(split, 1) == (
        "F 1 0 keep=all | F 1 1 keep=all | BI 1 0 | BW 1 0"
        " | F 1 2 keep=all | BI 1 1 | BW 1 1 | BI 1 2 | BW 1 2"
    )
    filled = apply("fill-bubbles", split, context)
    assert text(filled, 1) == (
        "F 1 0 keep=all | F 1 1 keep=all | BI 1 0 | F 1 2 keep=all"
        " | BI 1 1 | BW 1 0 | BI 1 2 | BW 1 1 | BW 1 2"
    )
    assert text(filled, 2) == (
        "F 2 0 keep=all | BI 2 0 | F 2 1 keep=all | BI 2 1"
        " | F 2 2 keep=all | BI 2 2 | BW 2 0 | BW 2 1 | BW 2 2"
    )
    joined = apply("concatenate", filled, context)
    assert text(joined, 1).endswith("BI 1 1 | BW 1 0 | BI 1 2 | BW 1 1,2")
    assert text(joined, 2).endswith("BI 2 2 | BW 2 0,1,2")
    seconds = [makespan_s(one, context) for one in (schedule, split, filled, joined)]
    assert seconds == [15.0, 13.0, 11.0, 11.0]


def test_weight_gradients_that_do_not_fit_delay_nobody() -> None:
    """With p2 twice as long as every gap, only gaps of waiting for the last gradients are used."""
    schedule = schedule_for("1f1b", 3, 3)
    context = context_of(schedule, p2=2.0)
    result = apply("2bp", schedule, context)
    bare = apply("2bp", schedule, context_of(schedule, p2=0.0))
    assert makespan_s(result, context) == 14.0
    assert bare == schedule


@settings(max_examples=80, deadline=None)
@given(
    scheme=st.sampled_from(sorted(SCHEMES)),
    devices=st.sampled_from([2, 3, 4]),
    micro_batches=st.integers(1, 8),
    p1=st.sampled_from([0.5, 1.0, 1.3]),
    p2=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    overhead=st.sampled_from([0.0, 0.1]),
    mode=st.sampled_from(["none", "full"]),
    mario=st.booleans(),
)
def test_no_scheme_gets_slower_and_every_pass_leaves_a_valid_plan(
    scheme: str,
    devices: int,
    micro_batches: int,
    p1: float,
    p2: float,
    overhead: float,
    mode: Literal["none", "full"],
    mario: bool,
) -> None:
    try:
        schedule = schedule_for(scheme, devices, micro_batches, recompute=mode)
    except ConfigError:
        return
    context = context_of(schedule, p1=p1, p2=p2, overhead=overhead)
    if mario:
        schedule = PASSES["mario"].run(schedule, context)
    before_s = makespan_s(schedule, context)
    assert makespan_s(apply("2bp", schedule, context), context) <= before_s * (1 + 1e-9)
    steps = ("split-backward", "fill-bubbles", "concatenate", "flush-half")
    for name, after_s in seconds_after_each(steps, schedule, context):
        if name != "flush-half" and not overhead:
            assert after_s <= before_s * (1 + 1e-9)


def peaks(schedule: Schedule, context: PassContext) -> tuple[float, ...]:
    return peak_bytes(schedule.layout, schedule.residency, context.costs, schedule.orders)


def test_half_way_flush_of_figure_5() -> None:
    """1F1B-2 keeps derivatives of all 2N micro-batches on its last device, or of half of them."""
    schedule = schedule_for("1f1b-2", 4, 8)
    context = context_of(schedule)
    split = apply("split-backward,fill-bubbles,concatenate", schedule, context)
    flushed = apply("flush-half", split, context)
    assert peaks(schedule, context) == (4.0, 3.0, 2.0, 1.0)
    assert peaks(split, context) == (6.0, 5.5, 5.0, 4.5)
    assert peaks(flushed, context) == (5.5, 4.5, 3.5, 2.5)
    assert [makespan_s(one, context) for one in (schedule, split, flushed)] == [33.0, 27.0, 30.0]
    assert text(flushed, 3) == (
        "F 3 0 keep=all | BI 3 0 | F 3 1 keep=all | BI 3 1 | F 3 2 keep=all | BI 3 2"
        " | F 3 3 keep=all | BI 3 3 | BW 3 0,1,2,3 | F 3 4 keep=all | BI 3 4 | F 3 5 keep=all"
        " | BI 3 5 | F 3 6 keep=all | BI 3 6 | F 3 7 keep=all | BI 3 7 | BW 3 4,5,6,7"
    )


@pytest.mark.parametrize(
    ("memory", "peak", "seconds"), [(5.0, 5.0, 27.0), (4.0, 4.0, 27.0), (3.0, 4.0, 28.0)]
)
def test_a_memory_limit_bounds_what_is_deferred(memory: float, peak: float, seconds: float) -> None:
    """4 is what the first device needs unsplit: nothing can be deferred there."""
    schedule = schedule_for("1f1b-2", 4, 8)
    context = context_of(schedule, memory=memory)
    names = "split-backward,fill-bubbles,concatenate,limit-deferred"
    result = apply(names, schedule, context)
    validate(lower(result))
    assert (max(peaks(result, context)), makespan_s(result, context)) == (peak, seconds)


def test_the_same_time_within_the_memory_of_the_unsplit_schedule() -> None:
    schedule = schedule_for("1f1b-2", 4, 8)
    context = context_of(schedule)
    result = apply("2bp", schedule, context)
    assert (peaks(result, context), makespan_s(result, context)) == ((4.0, 3.5, 3.0, 2.5), 27.0)


def test_calls_are_not_joined_where_overhead_is_no_matter_of_taste() -> None:
    """Split calls cost their overhead twice: where that is more than 2BP gains, nothing is done."""
    schedule = schedule_for("1f1b", 2, 8)
    context = context_of(schedule, p2=0.05, overhead=1.0)
    assert apply("2bp", schedule, context) == schedule


@pytest.mark.parametrize(
    ("scheme", "before", "after"),
    [
        ("interleaved", 28.5, 25.5),
        ("chimera", 30.0, 25.0),
        ("hanayo", 33.0, 25.5),
        ("zb-h1", 27.0, 27.0),
        ("mobius", 28.5, 27.0),
        ("megatron-offload", 28.5, 25.5),
    ],
)
def test_other_schemes_gain_too(scheme: str, before: float, after: float) -> None:
    schedule = schedule_for(scheme, 4, 8)
    context = context_of(schedule)
    result = apply("2bp", schedule, context)
    assert (makespan_s(schedule, context), makespan_s(result, context)) == (before, after)
    assert result.residency is Residency(schedule.residency)


def test_checkpointed_and_split_beats_neither() -> None:
    """Mario's future work (section 8): recomputation and weight gradients share the bubbles."""
    schedule = schedule_for("1f1b", 4, 4)
    context = context_of(schedule)
    seconds = [
        makespan_s(schedule, context),
        makespan_s(apply("mario", schedule, context), context),
        makespan_s(apply("2bp,mario", schedule, context), context),
    ]
    assert seconds == [21.0, 22.0, 18.0]


def test_the_page_shows_table_1_and_figure_5() -> None:
    table = paper.table_1()
    assert len(table.rows) == 16
    assert all(row[2::2] == row[3::2] for row in table.rows)
    assert [row[:2] for row in paper.figure_5().rows] == [
        ("unsplit", "33"),
        ("2BP of the paper", "27"),
        ("flush half-way (figure 5)", "30"),
        ("limit-deferred, 4 activations", "27"),
        ("2bp", "27"),
    ]
