"""Passes of our own, and SPipe's section 3 as passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.cost.sources import Prices
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.decoupled import estimate_s
from penstock.planner.passes.dispatch import makespan_s
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.planning.pipeline import PlanContext, make_schedule
from penstock.planner.schedule.layout import ComputeInstruction
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import (
    Forward,
    Keep,
    Recompute,
    RecomputeAfter,
    RecvCheckpoint,
    SendCheckpoint,
)

OPERATORS = (
    OperatorCost(name="norm", forward_s=0.1, activation_bytes=2.0),
    OperatorCost(name="qkv", forward_s=0.5, activation_bytes=3.0),
    OperatorCost(name="down", forward_s=0.4, activation_bytes=0.0),
)
BLOCK = BlockCost(
    forward_s=1.0,
    recompute_s=1.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    output_bytes=1.0,
    activation_bytes=6.0,
    weight_bytes=1.0,
    operators=OPERATORS,
)
HEAD = replace(BLOCK, forward_s=0.5, recompute_s=0.5, operators=OPERATORS[:1])


def _schedule(scheme: str, num_blocks: int = 16, **sizes: int) -> Schedule:
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=4,
        num_microbatches=8,
        forward_stages=sizes.get("forward", 8),
        backward_stages=sizes.get("backward"),
        recompute="full",
        recompute_after=RecomputeAfter.GRADIENT,
    )
    return build_schedule(request, [1.0] * num_blocks)


def _context(num_blocks: int = 16, *, limit: float | None = None) -> PassContext:
    return PassContext(
        costs=Costs(blocks=(BLOCK,) * num_blocks),
        cluster=Cluster(devices_per_node=4),
        memory_limit_bytes=limit,
    )


def _forwards(schedule: Schedule) -> list[Forward]:
    return [i for order in schedule.orders for i in order if isinstance(i, Forward)]


def test_mobius_decoupled_and_refined_is_spipe() -> None:
    """A backward stage takes three times a forward stage, but a stage of two blocks has two."""
    context = _context()
    schedule = PASSES["decouple-backward"].run(_schedule("mobius"), context)
    assert schedule == _schedule("spipe", backward=8)
    assert PASSES["refine-backward"].run(schedule, context) == _schedule("spipe", backward=16)


def test_refined_backward_stages_are_as_long_as_forward_stages() -> None:
    context = _context(48)
    schedule = PASSES["refine-backward"].run(_schedule("mobius", 48), context)
    assert len(schedule.layout.backward) == 24
    assert {len(stage.blocks) for stage in schedule.layout.forward} == {6}
    assert {len(stage.blocks) for stage in schedule.layout.backward} == {2}


def test_decoupling_removes_the_bubble_before_the_backward() -> None:
    """128 of work, and p - 1 = 3 times the longest hop: forward and backward of a stage in Mobius,
    a backward stage here.
    """
    context = _context()
    mobius = _schedule("mobius")
    decoupled = PASSES["decouple-backward"].run(mobius, context)
    assert makespan_s(mobius, context) == 128 + 3 * 8
    assert makespan_s(decoupled, context) == 128 + 3 * 6
    assert makespan_s(PASSES["refine-backward"].run(decoupled, context), context) == 128 + 3 * 3


def test_checkpoints_leave_at_once_and_are_received_ahead() -> None:
    """Asynchronous checkpoint communication: sent behind their forward, received stages earlier."""
    plan = lower(_schedule("spipe", backward=16))
    ahead: dict[int, int] = {}
    for program in plan.programs:
        posted: dict[tuple[int, int], int] = {}
        for position, instruction in enumerate(program):
            match instruction:
                case SendCheckpoint(micro_batch=m):
                    made = next(i for i in program[position::-1] if isinstance(i, Forward))
                    assert made.micro_batch == m
                case RecvCheckpoint(stage=b, micro_batch=m):
                    posted[b, m] = position
                case Recompute(stage=b, micro_batch=m) if (b, m) in posted:
                    between = program[posted[b, m] : position]
                    count = sum(isinstance(i, ComputeInstruction) for i in between)
                    ahead[b] = min(count, ahead.get(b, count))
    assert len(ahead) > 8
    assert all(count > 16 for stage, count in ahead.items() if stage < 8)


@pytest.mark.parametrize("name", ["decouple-backward", "refine-backward", "match-stages"])
@pytest.mark.parametrize(
    ("scheme", "reason"),
    [("1f1b", "keeps weights on their devices"), ("megatron-offload", "between backwards")],
)
def test_what_cannot_be_decoupled(name: str, scheme: str, reason: str) -> None:
    schedule = _schedule(scheme, forward=4 if scheme == "1f1b" else 8)
    with pytest.raises(ConfigError, match=reason):
        PASSES[name].run(schedule, _context())


def test_dead_forwards_are_left_out() -> None:
    """Forward stage 7 is cut in two: block 15 is only recomputed, by backward stage 15."""
    context = _context()
    before = _schedule("spipe", backward=16)
    schedule = PASSES["skip-dead-forward"].run(before, context)
    blocks = [stage.blocks for stage in schedule.layout.forward]
    assert blocks[-2:] == [range(14, 15), range(15, 16)]
    assert len(blocks) == 9
    assert {f.stage for f in _forwards(schedule)} == set(range(8))
    assert makespan_s(schedule, context) <= makespan_s(before, context)
    validate(lower(schedule))


def test_forwards_that_keep_activations_are_not_dead() -> None:
    schedule = PASSES["keep-what-fits"].run(_schedule("mobius"), _context())
    with pytest.raises(ConfigError, match="keeps activations"):
        PASSES["skip-dead-forward"].run(schedule, _context())


def test_matched_stages_are_balanced() -> None:
    """49 blocks on 4 devices: 3 forward and 6 backward stages each, and one more, dead in the
    forward.
    """
    costs = Costs(blocks=(BLOCK,) * 48 + (HEAD,))
    context = PassContext(costs=costs, cluster=Cluster(devices_per_node=4))
    spipe = _schedule("spipe", 49, backward=24)
    schedule = PASSES["match-stages"].run(spipe, context)
    for name in ("overlap-recompute", "skip-dead-forward"):
        schedule = PASSES[name].run(schedule, context)
    layout = schedule.layout
    assert (len(layout.forward), len(layout.backward)) == (13, 25)
    assert layout.forward[-1].blocks == layout.backward[-1].blocks
    makespan = makespan_s(schedule, context)
    assert makespan < makespan_s(spipe, context)
    assert makespan == pytest.approx(estimate_s(layout, costs), rel=0.03)
    validate(lower(schedule))


def test_matching_minds_the_overhead_of_instructions() -> None:
    costs = Costs(blocks=(BLOCK,) * 48, instruction_s=3.0)
    context = PassContext(costs=costs, cluster=Cluster(devices_per_node=4))
    schedule = PASSES["match-stages"].run(_schedule("spipe", 48, backward=24), context)
    assert len(schedule.layout.backward) < 25


def _drops(schedule: Schedule) -> dict[int, tuple[str, ...]]:
    return {f.stage: f.drop for f in _forwards(schedule)}


def test_everything_is_kept_where_it_fits() -> None:
    schedule = PASSES["keep-what-fits"].run(_schedule("mobius"), _context())
    assert {f.keep for f in _forwards(schedule)} == {Keep.ALL}
    assert not any(isinstance(i, Recompute) for order in schedule.orders for i in order)
    assert schedule.rebinds_weights
    validate(lower(schedule))


def test_dearest_operators_are_kept_first() -> None:
    """A stage has two blocks, its device 8 micro-batches of two stages. With both operators dropped
    the peak is 43; qkv of a stage takes 48 more, norm 32. At 43 + 48 + 31 one stage keeps qkv.
    """
    tightest = device_peaks(
        lower(PASSES["keep-what-fits"].run(_schedule("mobius"), _context(limit=60.0))),
        _context().costs,
    )
    peak = max(one.total_bytes for one in tightest)
    for room, expected in (
        (0, {("norm", "qkv")}),
        (48, {("norm",), ("norm", "qkv")}),
        (96, {("norm",)}),
        (128, {(), ("norm",)}),
        (160, {()}),
    ):
        context = _context(limit=peak + room)
        schedule = PASSES["keep-what-fits"].run(_schedule("mobius"), context)
        assert set(_drops(schedule).values()) == expected
        plan = lower(schedule)
        validate(plan)
        peaks = device_peaks(plan, context.costs)
        assert max(one.total_bytes for one in peaks) <= peak + room


def test_memory_too_small_for_anything() -> None:
    with pytest.raises(ConfigError, match="with everything dropped, the limit is 10"):
        PASSES["keep-what-fits"].run(_schedule("mobius"), _context(limit=10.0))


def test_costs_without_operators_leave_nothing_to_choose() -> None:
    costs = Costs(blocks=(replace(BLOCK, operators=()),) * 16)
    context = PassContext(costs=costs, cluster=Cluster(devices_per_node=4))
    with pytest.raises(ConfigError, match="costs name no operators"):
        PASSES["keep-what-fits"].run(_schedule("mobius"), context)


def _kept(schedule: Schedule) -> set[tuple[int, int]]:
    return {(f.stage, f.micro_batch) for f in _forwards(schedule) if f.keep is Keep.ALL}


def test_all_graphs_are_kept_where_they_fit() -> None:
    schedule = PASSES["keep-graphs"].run(_schedule("mobius"), _context())
    assert len(_kept(schedule)) == 8 * 8
    assert not any(isinstance(i, Recompute) for order in schedule.orders for i in order)
    assert schedule.rebinds_weights
    validate(lower(schedule))


@pytest.mark.parametrize("scheme", ["mobius", "gpipe", "1f1b"])
def test_graphs_that_wait_shortest_are_kept_first(scheme: str) -> None:
    """The graphs of the last stage, then of those before it; never more than the limit."""
    sizes = {} if scheme == "mobius" else {"forward": 4}
    before = _schedule(scheme, **sizes)
    costs = _context().costs
    least = max(peak.total_bytes for peak in device_peaks(lower(before), costs))
    numbers = []
    for room in (0.0, 24.0, 60.0, 1000.0):
        context = _context(limit=least + room)
        schedule = PASSES["keep-graphs"].run(before, context)
        kept, plan = _kept(schedule), lower(schedule)
        validate(plan)
        made = {
            (i.stage, i.micro_batch) for o in schedule.orders for i in o if type(i) is Recompute
        }
        assert not kept & made and len(kept | made) == len(_forwards(schedule))
        peaks = device_peaks(plan, costs)
        assert max(peak.total_bytes for peak in peaks) <= least + room
        for device in range(4):
            stages = schedule.layout.forward_stages_on(device)
            numbers_of = [sum(s == stage for s, _ in kept) for stage in stages]
            assert numbers_of == sorted(numbers_of)
        numbers.append(len(kept))
    assert numbers == sorted(numbers) and numbers[1] > 0
    assert numbers[-1] == len(_forwards(before))


def test_graphs_need_coupled_stages_and_room_for_the_rest() -> None:
    with pytest.raises(ConfigError, match="spipe: its backward stages are elsewhere"):
        PASSES["keep-graphs"].run(_schedule("spipe", backward=8), _context())
    with pytest.raises(ConfigError, match="with everything recomputed, the limit is 10"):
        PASSES["keep-graphs"].run(_schedule("mobius"), _context(limit=10.0))


def test_guessed_graphs_are_reckoned_larger_than_measured_ones() -> None:
    guessed = Costs(blocks=(replace(BLOCK, operators=()),) * 16)
    least = max(peak.total_bytes for peak in device_peaks(lower(_schedule("mobius")), guessed))
    context = _context(limit=least + 100.0)
    measured = PASSES["keep-graphs"].run(_schedule("mobius"), context)
    careful = PASSES["keep-graphs"].run(_schedule("mobius"), replace(context, costs=guessed))
    assert 0 < len(_kept(careful)) < len(_kept(measured))


@pytest.mark.parametrize("scheme", ["mobius", "gpipe", "1f1b", "zb-h1", "spipe"])
def test_recompute_auto_keeps_what_fits(scheme: str) -> None:
    """As keep-graphs does where stages are coupled; elsewhere all is recomputed, as with full."""
    costs = _context().costs
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=4,
        num_microbatches=8,
        forward_stages=8 if scheme in ("mobius", "spipe") else 4,
    )
    full = replace(request, recompute="full")

    def made(request: ScheduleRequest, limit: float | None) -> Schedule:
        prices = Prices(costs=costs, cluster=Cluster(devices_per_node=4))
        return make_schedule(request, PlanContext(prices=prices, memory_limit_bytes=limit))

    least = max(peak.total_bytes for peak in device_peaks(lower(made(full, None)), costs))
    numbers = []
    for limit in (1.0, least + 24.0, None):
        schedule = made(replace(request, recompute="auto"), limit)
        validate(lower(schedule))
        kept = len(_kept(schedule))
        numbers.append(kept)
        if kept:
            passed = replace(full, passes=("keep-graphs",))
            assert schedule == made(passed, limit)
    every = len(_forwards(schedule))
    assert numbers[0] == 0 and (numbers[1:] == [0, 0] if scheme == "spipe" else numbers[2] == every)
    assert scheme == "spipe" or 0 < numbers[1] < every
