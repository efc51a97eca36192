"""Mario's passes: the paper's steps, exact; every scheme stays valid and never gets slower."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers import mario as paper
from bench.papers.mario.evaluation import Rates
from bench.papers.mario.recording import load
from bench.papers.mario.testbed import Run
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.frameworks import MEGATRON_DEEPSPEED
from penstock.planner.passes import PASSES
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.passes.dispatcher import Board, Dispatcher, FillPolicy
from penstock.planner.schedule.bounds import lower_bound_s
from penstock.planner.schedule.layout import Order, Residency, StageLayout
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schedule.timing import order_times
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import simulate
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import Forward, Recompute, parse_program
from penstock.protocol.plan.plan import StageRange
from tests.planner.passing import schedule_for, seconds_after_each, text

STEPS = ("apply-checkpoint", "overlap-recompute", "remove-redundancy", "prepose-forward")


def context_of(
    schedule: Schedule,
    *,
    backward: float = 2.0,
    recompute: float = 1.0,
    hop: float = 0.0,
    memory: float | None = None,
) -> PassContext:
    """A device's share of the model takes 1 forward, and keeps 1 byte of a micro-batch, or 1/8."""
    share = schedule.layout.num_devices / schedule.layout.num_blocks
    block = BlockCost(
        forward_s=share,
        recompute_s=share * recompute,
        backward_input_s=share * backward / 2,
        backward_weight_s=share * backward / 2,
        activation_bytes=share,
        output_bytes=0.125,
    )
    return PassContext(
        costs=Costs(blocks=(block,) * schedule.layout.num_blocks),
        cluster=Cluster(devices_per_node=4),
        memory_limit_bytes=memory,
        hop_s=hop,
    )


def seconds_after_each_step(schedule: Schedule, context: PassContext) -> list[float]:
    seconds = [makespan_s(schedule, context)]
    for step in STEPS:
        schedule = PASSES[step].run(schedule, context)
        seconds.append(makespan_s(schedule, context))
    return seconds


def test_the_four_steps_of_figure_2() -> None:
    schedule = schedule_for("1f1b", 4, 4)
    context = context_of(schedule)
    assert seconds_after_each_step(schedule, context) == [21.0, 28.0, 25.0, 23.0, 22.0]
    assert makespan_s(PASSES["mario"].run(schedule, context), context) == 22.0


def test_a_simulation_of_the_plan_says_the_same() -> None:
    schedule = schedule_for("1f1b", 4, 4)
    context = context_of(schedule)
    steps = [schedule]
    for step in STEPS:
        steps.append(PASSES[step].run(steps[-1], context))
    simulated = [simulate(lower(one), context.costs, context.cluster) for one in steps]
    assert [one.pipeline_s for one in simulated] == [21.0, 28.0, 25.0, 23.0, 22.0]


def test_what_each_pass_does_to_a_device() -> None:
    schedule = schedule_for("1f1b", 3, 3)
    context = context_of(schedule)
    checkpointed = PASSES["apply-checkpoint"].run(schedule, context)
    assert text(checkpointed, 2) == (
        "F 2 0 keep=input | R 2 0 after=gradient | B 2 0"
        " | F 2 1 keep=input | R 2 1 after=gradient | B 2 1"
        " | F 2 2 keep=input | R 2 2 after=gradient | B 2 2"
    )
    overlapped = PASSES["overlap-recompute"].run(checkpointed, context)
    assert text(overlapped, 1) == (
        "F 1 0 keep=input | F 1 1 keep=input | R 1 0 | B 1 0"
        " | F 1 2 keep=input | R 1 1 | B 1 1 | R 1 2 | B 1 2"
    )
    without = PASSES["remove-redundancy"].run(overlapped, context)
    assert text(without, 2) == (
        "F 2 0 keep=all | B 2 0 | F 2 1 keep=all | B 2 1 | F 2 2 keep=all | B 2 2"
    )
    preposed = PASSES["prepose-forward"].run(without, context)
    assert text(preposed, 1) == (
        "F 1 0 keep=input | F 1 1 keep=input | R 1 0 | F 1 2 keep=input"
        " | B 1 0 | R 1 1 | B 1 1 | R 1 2 | B 1 2"
    )


def test_recomputation_moves_ahead_of_a_forward_that_waits() -> None:
    """The first device's forwards are slow; the second recomputes instead of waiting for them."""
    schedule = parse_schedule(
        "device 0: F 0 0 keep=input; F 0 1 keep=input; R 0 0; B 0 0; R 0 1; B 0 1\n"
        "device 1: F 1 0 keep=input; F 1 1 keep=input; R 1 0; B 1 0; R 1 1; B 1 1\n"
    )
    blocks = tuple(
        BlockCost(forward_s=f, recompute_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
        for f in (3.0, 1.0)
    )
    context = PassContext(costs=Costs(blocks=blocks), cluster=Cluster(devices_per_node=2))
    result = PASSES["overlap-recompute"].run(schedule, context)
    assert text(result, 1) == (
        "F 1 0 keep=input | R 1 0 | F 1 1 keep=input | B 1 0 | R 1 1 | B 1 1"
    )
    assert (makespan_s(schedule, context), makespan_s(result, context)) == (15.0, 14.0)


def parse_schedule(program: str) -> Schedule:
    """Two devices with a stage of one block each, two micro-batches."""
    stages = tuple(StageRange(start=i, stop=i + 1, device=i) for i in range(2))
    layout = StageLayout(num_devices=2, num_microbatches=2, forward=stages, backward=stages)
    orders = cast("tuple[Order, ...]", parse_program(program))
    return Schedule(scheme="1f1b", layout=layout, orders=orders, residency=Residency.RESIDENT)


@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 4), (4, 8), (8, 8), (8, 32), (16, 32)])
@pytest.mark.parametrize("backward", [2.0, 1.6])
def test_1f1b_comes_as_near_as_its_busiest_device_allows(
    devices: int, micro_batches: int, backward: float
) -> None:
    """All devices but the last recompute; the one before it starts last and has the longest way
    back.
    """
    schedule = schedule_for("1f1b", devices, micro_batches)
    context = context_of(schedule, backward=backward)
    result = PASSES["mario"].run(schedule, context)
    best = (devices - 2) * (1.0 + backward) + micro_batches * (2.0 + backward)
    assert makespan_s(result, context) == pytest.approx(best)
    assert lower_bound_s(result.layout, result.orders, context.costs) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(sorted(SCHEMES)),
    devices=st.sampled_from([2, 3, 4]),
    micro_batches=st.integers(1, 8),
    backward=st.sampled_from([0.7, 1.0, 1.6, 2.0, 3.1]),
    recompute=st.sampled_from([0.5, 1.0, 1.2]),
    hop=st.sampled_from([0.0, 0.15]),
    mode=st.sampled_from(["none", "full"]),
    split=st.booleans(),
)
def test_no_scheme_gets_slower_and_every_pass_leaves_a_valid_plan(
    scheme: str,
    devices: int,
    micro_batches: int,
    backward: float,
    recompute: float,
    hop: float,
    mode: str,
    split: bool,
) -> None:
    try:
        schedule = schedule_for(scheme, devices, micro_batches, recompute=mode)
    except ConfigError:
        return
    context = context_of(schedule, backward=backward, recompute=recompute, hop=hop)
    if split:
        schedule = PASSES["2bp"].run(schedule, context)
    seconds = [after_s for _, after_s in seconds_after_each(STEPS, schedule, context)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(seconds))
    mario = PASSES["mario"].run(schedule, context)
    validate(lower(mario))
    assert makespan_s(mario, context) <= seconds[-1] * (1 + 1e-9)


def activations(schedule: Schedule) -> tuple[float, float]:
    """Least and most of all devices, in shares of the model that one device has."""
    costs = Costs(
        blocks=tuple(replace(b, output_bytes=0.0) for b in context_of(schedule).costs.blocks)
    )
    peaks = peak_bytes(schedule.layout, schedule.residency, costs, schedule.orders)
    return min(peaks), max(peaks)


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize(
    ("scheme", "without", "mario"),
    [
        ("gpipe", lambda d: (2 * d, 2 * d), 1.0),
        ("1f1b", lambda d: (1, d), 1.0),
        # The paper's maximum, (3 d - 2) / 2, leaves out the forward that follows the warm-up.
        ("interleaved", lambda d: ((d + 1) / 2, (3 * d - 1) / 2), 0.5),
        ("chimera", lambda d: (d / 2 + 1, d), 1.0),
        ("hanayo", lambda d: ((d + 1) / 2, d), 0.5),
    ],
)
def test_activation_memory_of_table_1(
    scheme: str, without: object, mario: float, devices: int
) -> None:
    assert callable(without)
    schedule = schedule_for(scheme, devices, 2 * devices)
    assert activations(schedule) == without(devices)
    context = context_of(schedule)
    for name in ("apply-checkpoint", "mario"):
        assert activations(PASSES[name].run(schedule, context)) == (mario, mario)


def test_preposed_forwards_stay_within_the_memory() -> None:
    """A device needs 1 for a graph, and 1/8 for each checkpoint: 1.375 without preposing."""
    schedule = schedule_for("1f1b", 4, 8)
    found: list[tuple[float, ...]] = []
    for memory in (None, 1.5, 1.375, 1.25):
        context = context_of(schedule, memory=memory)
        result = PASSES["mario"].run(schedule, context)
        peaks = peak_bytes(result.layout, result.residency, context.costs, result.orders)
        found.append((max(peaks), makespan_s(result, context)))
    assert found == [(1.75, 38.0), (1.5, 38.0), (1.375, 38.0), (1.375, 39.0)]


def test_swaps_of_what_is_not_kept_go() -> None:
    schedule = schedule_for("bpipe", 4, 8)
    assert any("SO" in text(schedule, device) for device in range(4))
    result = PASSES["mario"].run(schedule, context_of(schedule))
    assert not any("S" in text(result, device) for device in range(4))
    assert makespan_s(result, context_of(schedule)) == 38.0


def without_recomputation(schedule: Schedule) -> list[list[str]]:
    return [
        [str(i).partition(" keep")[0] for i in order if not isinstance(i, Recompute)]
        for order in schedule.orders
    ]


def test_streamed_weights_keep_the_order_of_their_stages() -> None:
    schedule = schedule_for("mobius", 4, 8)
    result = PASSES["mario"].run(schedule, context_of(schedule))
    assert without_recomputation(result) == without_recomputation(schedule)


@pytest.mark.parametrize("filling", list(FillPolicy))
@pytest.mark.parametrize("scheme", ["1f1b", "interleaved", "chimera"])
def test_a_dispatched_order_takes_the_time_that_was_dispatched(
    scheme: str, filling: FillPolicy
) -> None:
    schedule = schedule_for(scheme, 4, 8, recompute="full")
    context = context_of(schedule, backward=1.6, hop=0.2)
    movable = (Forward, Recompute)
    board = Board.of(schedule.layout, schedule.orders, context, movable)
    times = order_times(schedule.layout, schedule.orders, context.costs, hop_s=0.2)
    run = Dispatcher(board, times.starts, filling).run()
    orders = board.permuted(run).orders
    assert orders != schedule.orders
    after = order_times(schedule.layout, orders, context.costs, hop_s=0.2)
    assert run.starts_s == after.starts
    assert run.makespan_s == after.makespan_s


def test_the_page_shows_figure_2() -> None:
    assert paper.figure_2().rows == (
        ("no checkpointing", "21", "21", "21"),
        ("apply-checkpoint", "28", "28", "28"),
        ("overlap-recompute", "25", "25", "25"),
        ("remove-redundancy", "23", "23", "22"),
        ("prepose-forward", "22", "22", "22"),
    )


def test_the_recorded_evaluation_is_what_the_code_computes() -> None:
    """A row without and one with a fitted host, of the cheap ones."""
    recorded = load()
    slow = replace(
        MEGATRON_DEEPSPEED, name="fitted", launch_s=recorded["rates"]["launch_us"] * 1e-6
    )
    for framework in (MEGATRON_DEEPSPEED, slow):
        case = ("mario-gpt3-1.6b", "V", 8, "base")
        row = Rates(recorded=recorded).row(framework.name, *case)
        run = Run(model=case[0], shape="V", kind="base", framework=framework, devices=8)
        assert (run.rate, list(run.memory_gb)) == (
            pytest.approx(row["rate"]),
            pytest.approx(row["memory_gb"]),
        )


def test_larger_micro_batches_pay_where_the_host_is_slow() -> None:
    """What no roofline explains (section 6.1)."""
    rates = Rates(recorded=load())
    assert rates.gain("ideal", 32, "lmbs", "ovlp") < 1.0 < rates.gain("fitted", 32, "lmbs", "ovlp")
    assert rates.mean_error("fitted") < rates.mean_error("megatron-deepspeed")
    assert rates.mean_error("megatron-deepspeed") < rates.mean_error("ideal")


def test_the_page_has_every_figure_and_table() -> None:
    claims = paper.tables()[0]
    where = " ".join(row[0] for row in claims.rows)
    for number in range(1, 12):
        assert re.search(rf"figures? [\d, ]*\b{number}\b", where), number
    for number in (1, 2, 3, 5):
        assert re.search(rf"tables? [\d, ]*\b{number}\b", where), number
    assert all(all(row) for row in claims.rows)
