"""Obscura's integer program, swaps in orders, and Algorithm 1, on small examples."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from bench.papers.obscura.units import unit_schedule
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.passes import PASSES
from penstock.planner.passes.base import PassContext
from penstock.planner.passes.obscura import Grain, obscura
from penstock.planner.passes.obscura.aware import SwapRule, swap_aware_recompute, with_swaps
from penstock.planner.passes.obscura.memory import (
    away_microbatches,
    held_microbatches,
    order_memory,
    schedule_memory,
    stage_memory,
)
from penstock.planner.passes.obscura.migrate import (
    cost_effective,
    identify_cost_effective,
    migrate_forwards,
    refine_migration,
    relax_dependencies,
)
from penstock.planner.passes.obscura.partition import adjust_partition, move_block, partitions
from penstock.planner.passes.obscura.recompute import (
    RecomputeProblem,
    StageProblem,
    StageTimes,
    Swap,
    SwapStyle,
    Transfers,
    best_solution,
    communication_s,
    evictions_of,
    execution_times,
    solve,
    swaps,
)
from penstock.planner.passes.obscura.shape import (
    FULL,
    NONE,
    StageOrder,
    adjusted_stages,
    one_f_one_b_ahead,
    stage_orders,
    with_orders,
)
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import simulate
from penstock.planner.validate.check import validate
from penstock.protocol.plan.plan import StageRange

_OPERATORS = (
    ("norm", 0.02, 2.0),
    ("qkv", 0.2, 3.0),
    ("core", 0.1, 1.0),
    ("gate", 0.25, 2.5),
    ("silu", 0.03, 2.5),
    ("mul", 0.03, 2.5),
)
"""Name, seconds of a forward that takes 1, bytes of activations that are 16 with the input."""


def _block(share: float = 1.0) -> BlockCost:
    return BlockCost(
        forward_s=share,
        recompute_s=share,
        backward_input_s=share,
        backward_weight_s=share,
        output_bytes=1.0,
        activation_bytes=16.0 * share,
        static_bytes=60.0 * share,
        operators=tuple(
            OperatorCost(name=name, forward_s=share * seconds, activation_bytes=share * size)
            for name, seconds, size in _OPERATORS
        ),
    )


def _context(
    num_blocks: int, limit: float, *, share: float = 1.0, host: float = 12.0
) -> PassContext:
    return PassContext(
        costs=Costs(blocks=(_block(share),) * num_blocks),
        cluster=Cluster(
            devices_per_node=8, fetch_bandwidth=host, offload_bandwidth=host, peer_bandwidth=100.0
        ),
        memory_limit_bytes=limit,
    )


def _relaxed(schedule: Schedule, context: PassContext, grain: Grain = Grain.STAGE) -> Schedule:
    schedule = identify_cost_effective(schedule, context, grain=grain)
    for step in (migrate_forwards, relax_dependencies, refine_migration):
        schedule = step(schedule, context)
    return schedule


def _brute_force(problem: RecomputeProblem, swap: Swap) -> float | None:
    """T_0 of the best set of operators by Equations 1-4 as they are written."""
    names = range(len(problem.operators))
    sets = (chosen for size in range(len(names) + 1) for chosen in combinations(names, size))
    times = [_time_of(problem, swap, chosen) for chosen in sets]
    return min((time for time in times if time is not None), default=None)


def _time_of(problem: RecomputeProblem, swap: Swap, chosen: tuple[int, ...]) -> float | None:
    stages: list[StageTimes] = []
    transfers: list[Transfers] = []
    for index, at in enumerate(problem.stages):
        evicted = problem.evicted(index, swap)
        kept = at.activation_bytes - sum(at.operator_bytes[i] for i in chosen)
        remade = max(sum(row[i] for i in chosen) for row in at.remade_bytes)
        needed = (at.held - evicted) * kept + (1.0 - swap.fraction) * evicted * kept
        block_s = kept * swap.fraction / problem.bandwidth(swap.style)
        times = StageTimes(
            forward_s=at.forward_s,
            backward_s=at.backward_s,
            recompute_s=sum(at.operator_s[i] for i in chosen),
        )
        fits = at.fixed_bytes + needed + remade <= problem.limit_bytes + 1e-9
        if swap.style is SwapStyle.PEER:
            guests = evicted + 1 if evicted else 0
            fits = fits and guests * kept <= at.peer_bytes + 1e-9
        if evicted:
            fits = fits and evicted <= evictions_of(at) and block_s <= times.busy_s + 1e-9
            fits = fits and block_s <= evictions_of(at) // evicted * at.forward_s + 1e-9
        if not fits:
            return None
        stages.append(times)
        transfers.append(Transfers(evicted=evicted, block_s=block_s))
    pace = max(stage.busy_s for stage in stages)
    last = problem.last_adjusted
    time = problem.following_s
    for index in reversed(range(last + 1)):
        moved = communication_s(stages[index], transfers[index], stages_after=last - index)
        own = pace * (problem.num_microbatches + last - index) + moved
        time = max(time + pace if time else 0.0, own)
    return time


def _random_problem(seed: int) -> RecomputeProblem:
    """Up to three adjusted stages; memory for a third to nearly all, transfers of 0.3 to 3 f."""
    rng = Random(seed)
    stages = tuple(_random_stage(rng) for _ in range(rng.randint(1, 3)))
    limit = max(s.fixed_bytes + s.held * s.activation_bytes * rng.uniform(0.2, 0.8) for s in stages)
    return RecomputeProblem(
        operators=tuple("abcdef"),
        stages=stages,
        num_microbatches=rng.choice((16, 48)),
        following_s=rng.choice((0.0, rng.uniform(40.0, 160.0))),
        limit_bytes=limit,
        host_bandwidth=stages[0].activation_bytes / rng.uniform(0.3, 3.0),
        peer_bandwidth=stages[0].activation_bytes / rng.uniform(0.1, 1.0),
    )


def _random_stage(rng: Random) -> StageProblem:
    sizes = tuple(rng.uniform(1.0, 4.0) for _ in range(6))
    first = tuple(size * rng.choice((0.0, 0.5, 1.0)) for size in sizes)
    second = tuple(size - part for size, part in zip(sizes, first, strict=True))
    return StageProblem(
        forward_s=rng.uniform(0.9, 1.1),
        backward_s=rng.uniform(1.8, 2.2),
        operator_s=tuple(rng.uniform(0.01, 0.2) for _ in range(6)),
        operator_bytes=sizes,
        remade_bytes=rng.choice(((sizes,), (first, second))),
        activation_bytes=sum(sizes) + 1.0,
        fixed_bytes=rng.uniform(10.0, 20.0),
        held=rng.randint(7, 14),
        peer=rng.choice((None, 7)),
        peer_bytes=rng.uniform(5.0, 40.0),
    )


def test_the_integer_program_finds_what_brute_force_finds() -> None:
    seen: set[tuple[SwapStyle, bool]] = set()
    sets: set[tuple[str, ...]] = set()
    for problem in map(_random_problem, range(8)):
        expected = {swap: _brute_force(problem, swap) for swap in swaps(problem, (1, 3))}
        for swap, time in expected.items():
            choice = solve(problem, swap)
            seen.add((swap.style, choice is not None))
            assert (choice.time_s if choice else None) == pytest.approx(time), swap
            if choice is not None:
                sets.add(choice.drop)
                chosen = tuple(map(problem.operators.index, choice.drop))
                assert _time_of(problem, swap, chosen) == pytest.approx(time)
    designs = {(style, solved) for style in SwapStyle for solved in (True, False)}
    assert seen == designs - {(SwapStyle.NONE, False)}
    assert len(sets) > 8


def test_the_fastest_combination_wins_and_moves_least() -> None:
    problem = _random_problem(1)
    best = best_solution(problem, (1, 3))
    times = [_brute_force(problem, swap) for swap in swaps(problem, (1, 3))]
    assert best is not None
    assert best.time_s == pytest.approx(min(time for time in times if time is not None))
    roomy = replace(problem, limit_bytes=1e6)
    untouched = best_solution(roomy, (1, 3))
    assert untouched is not None
    assert (untouched.drop, untouched.swap) == ((), Swap())
    assert best_solution(replace(problem, limit_bytes=1.0), (1, 3)) is None


def test_communication_by_hand() -> None:
    """Equation 2: f = 1, b = 2, r = 1; a block takes 4, three are evicted."""
    times, transfers = (
        StageTimes(forward_s=1.0, backward_s=2.0, recompute_s=1.0),
        Transfers(evicted=3, block_s=4.0),
    )
    assert communication_s(times, transfers, stages_after=0) == 9.0 + 3.0
    assert communication_s(times, transfers, stages_after=2) == 3.0 + 3.0
    assert communication_s(times, transfers, stages_after=4) == 3.0
    assert communication_s(times, replace(transfers, block_s=0.5), stages_after=0) == 0.0


def test_uneven_stages_go_at_the_pace_of_the_slowest() -> None:
    """Equation 5: C_adj = 4, C_non = 3.5; p = 4, m = 10, k = 1."""
    stages = [
        StageTimes(forward_s=1.0, backward_s=2.0, recompute_s=1.0),
        StageTimes(forward_s=0.9, backward_s=1.8, recompute_s=0.9),
        StageTimes(forward_s=1.0, backward_s=2.0),
        StageTimes(forward_s=1.2, backward_s=2.3),
    ]
    assert execution_times(stages, 10, 1) == (46.5, 42.5, 38.5, 35.0)
    assert execution_times(stages, 100, 1) == (404.0, 400.0, 353.5, 350.0)


def _order(num_stages: int, stage: int, count: int, warmup: int) -> StageOrder:
    usual = one_f_one_b_ahead(num_stages, stage, count)
    ahead = tuple(min(max(warmup, usual[0]) + m, count) for m in range(count))
    return StageOrder(stage=stage, recompute=NONE, ahead=ahead)


def _text(order: StageOrder, rule: SwapRule) -> str:
    return " ".join(
        f"{i.opcode.value}{i.micro_batch}"  # type: ignore[union-attr]
        for i in with_swaps(order, rule)
    )


def test_swaps_in_their_three_phases() -> None:
    """Eight in flight, two evicted: in the warm-up, later one for each that comes back."""
    assert _text(_order(4, 0, 12, 8), SwapRule(evicted=2, fraction=1.0)) == (
        "F0 F1 F2 F3 F4 SO4 F5 SO5 F6 F7 B0 F8 B1 F9 SO9 B2 SI4 F10 SO10 B3 SI5 F11 B4 B5 B6 B7"
        " SI9 B8 SI10 B9 B10 B11"
    )
    slow = _text(_order(4, 0, 12, 8), SwapRule(evicted=2, fraction=1.0, pace=2))
    assert slow.startswith("F0 F1 F2 SO2 F3 F4 SO4 F5 F6 F7 SO7 B0 SI2 F8 B1")
    untouched = _order(4, 0, 12, 8)
    assert with_swaps(untouched, SwapRule(evicted=0, fraction=1.0)) == untouched.instructions()


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(
    ("warmup", "evicted", "pace"), [(8, 2, 1), (10, 3, 2), (16, 12, 1), (9, 1, 5)]
)
def test_swaps_keep_equation_1_all_the_time(
    fraction: float, warmup: int, evicted: int, pace: int
) -> None:
    order = _order(4, 0, 40, warmup)
    swapped = with_swaps(order, SwapRule(evicted=evicted, fraction=fraction, pace=pace))
    assert held_microbatches(swapped) <= warmup - evicted * fraction + 1e-9
    assert held_microbatches(order.instructions()) == warmup
    outs = [i for i in swapped if i.opcode.value == "SO"]
    ins = [i for i in swapped if i.opcode.value == "SI"]
    assert len(outs) == len(ins) >= evicted
    assert away_microbatches(swapped) <= (evicted + 1) * fraction + 1e-9


def test_memory_of_the_equation_is_that_of_the_plan() -> None:
    """What the passes count and what the plan's books say, on every stage of every step."""
    context = _context(8, 170.0)
    schedule = unit_schedule(8, 32)
    start = with_orders(schedule, (replace(o, recompute=FULL) for o in stage_orders(schedule)))
    for one in (schedule, start, obscura(schedule, context)):
        peaks = [peak.total_bytes for peak in device_peaks(lower(one), context.costs)]
        counted = schedule_memory(one, context.costs, Grain.STAGE)
        # Counted are four activations or gradients between stages, of 1 byte.
        assert all(0.0 <= c - p <= 4.0 for p, c in zip(peaks, counted, strict=True))


def test_memory_by_hand() -> None:
    """Two half blocks a stage: 8 bytes each; dropping silu saves 1.25 in each."""
    context = _context(8, 1000.0, share=0.5)
    layout = unit_schedule(4, 8).layout
    stages = tuple(StageRange(start=2 * s, stop=2 * s + 2, device=s) for s in range(4))
    layout = replace(layout, forward=stages, backward=stages)
    drop = replace(FULL, mode="selective", drop=("silu",))
    whole = stage_memory(layout, context.costs, 1, drop, Grain.STAGE)
    part = stage_memory(layout, context.costs, 1, drop, Grain.BLOCK)
    assert (whole.fixed_bytes, whole.kept_bytes, whole.remade_bytes) == (64.0, 13.5, 2.5)
    assert (part.fixed_bytes, part.kept_bytes, part.remade_bytes) == (64.0, 13.5, 1.25)
    full = stage_memory(layout, context.costs, 1, FULL, Grain.STAGE)
    assert (full.kept_bytes, full.remade_bytes) == (1.0, 16.0)
    full = stage_memory(layout, context.costs, 1, FULL, Grain.BLOCK)
    assert (full.kept_bytes, full.remade_bytes) == (2.0, 8.0)
    order = StageOrder(stage=1, recompute=drop, ahead=one_f_one_b_ahead(4, 1, 8))
    assert order_memory(layout, context.costs, order, Grain.STAGE) == 64.0 + 3 * 13.5 + 2.5


def test_cost_effective_operators_first() -> None:
    """Stage s of 8 needs 64 + 16 (8 - s), dropping norm, silu and mul 64 + 9 (8 - s) + 7."""
    context, schedule = _context(8, 129.0), unit_schedule(8, 16)
    assert cost_effective(context.costs.blocks[0]).drop == ("norm", "silu", "mul")
    identified = identify_cost_effective(schedule, context)
    assert [order.recompute.mode for order in stage_orders(identified)] == [
        "full",
        "full",
        "selective",
        "selective",
        "none",
        "none",
        "none",
        "none",
    ]
    assert adjusted_stages(identified) == (0, 1)


@pytest.mark.parametrize("limit", [110.0, 125.0, 150.0, 170.0, 500.0])
@pytest.mark.parametrize("name", ["obscura", "obscura-any-swap"])
def test_the_result_is_valid_fits_and_is_not_slower_than_full_recomputation(
    name: str, limit: float
) -> None:
    context, schedule = _context(8, limit), unit_schedule(8, 24)
    result = PASSES[name].run(schedule, context)
    plan = lower(result)
    validate(plan)
    assert max(schedule_memory(result, context.costs, Grain.STAGE)) <= limit
    assert max(peak.total_bytes for peak in device_peaks(plan, context.costs)) <= limit
    everywhere = with_orders(schedule, (replace(o, recompute=FULL) for o in stage_orders(schedule)))
    reference = simulate(lower(everywhere), context.costs, context.cluster).pipeline_s
    assert simulate(plan, context.costs, context.cluster).pipeline_s <= reference


def test_both_designs_of_swapping_reach_the_plan() -> None:
    """A slow link to the host leaves only the peer, and the other way round."""
    schedule = unit_schedule(8, 24)
    context = _context(8, 130.0, host=0.05)
    to_peer = PASSES["obscura-any-swap"].run(schedule, context)
    swapped = {i.peer for order in to_peer.orders for i in order if i.opcode.value == "SO"}
    assert swapped and None not in swapped
    validate(lower(to_peer))
    peaks = device_peaks(lower(to_peer), context.costs)
    assert max(peak.total_bytes for peak in peaks) <= 130.0
    assert max(schedule_memory(to_peer, context.costs, Grain.STAGE)) <= 130.0
    slow_peer = replace(context.cluster, peer_bandwidth=0.05, fetch_bandwidth=50.0)
    host = replace(context, cluster=replace(slow_peer, offload_bandwidth=50.0))
    to_host = PASSES["obscura-any-swap"].run(schedule, host)
    assert {i.peer for order in to_host.orders for i in order if i.opcode.value == "SO"} == {None}
    validate(lower(to_host))


def test_too_little_memory_is_said() -> None:
    context = _context(8, 70.0)
    with pytest.raises(ConfigError, match=r"memory.device_limit = 70: stage 0 needs .* use more"):
        swap_aware_recompute(_relaxed(unit_schedule(8, 16), context), context)


def _halves(limit: float) -> tuple[Schedule, PassContext]:
    """Four stages of four quarter blocks; stages 0 and 1 recompute fully."""
    stages = tuple(StageRange(start=4 * s, stop=4 * s + 4, device=s) for s in range(4))
    plain = unit_schedule(4, 64)
    plain = replace(plain, layout=replace(plain.layout, forward=stages, backward=stages))
    orders = (replace(o, recompute=FULL) if o.stage < 2 else o for o in stage_orders(plain))
    return with_orders(plain, orders), _context(16, limit, share=0.25)


def test_moving_a_block_shifts_the_stages_between() -> None:
    schedule, _ = _halves(1000.0)
    moved = move_block(schedule.layout, 0, 3)
    expected = [(0, 3, 0), (3, 7, 1), (7, 11, 2), (11, 16, 3)]
    assert [(s.start, s.stop, s.device) for s in moved.forward] == expected
    assert moved.backward == moved.forward


def test_partition_by_hand() -> None:
    """Stages take 4, 4, 3, 3. One block less in both adjusted stages and one more in both others
    would make that 3, 3, 3.75, 3.75; so after two moves the others are slower.
    """
    schedule, context = _halves(1000.0)
    visited = list(partitions(schedule, context, Grain.STAGE))
    assert [[len(s.blocks) for s in one.layout.forward] for one in visited] == [
        [4, 4, 4, 4],
        [3, 4, 5, 4],
        [3, 3, 5, 5],
    ]
    printed = adjust_partition(schedule, context, printed=True)
    assert printed == visited[1]
    assert adjust_partition(schedule, context) == visited[2]
    assert adjust_partition(schedule, replace(context, memory_limit_bytes=None)) == visited[2]


def test_partition_respects_memory_and_balance() -> None:
    """Stage 2 holds two micro-batches: 64 + 2 x 16; with a block more 79 + 2 x 20."""
    schedule, context = _halves(118.0)
    visited = list(partitions(schedule, context, Grain.STAGE))
    assert [[len(s.blocks) for s in one.layout.forward] for one in visited] == [
        [4, 4, 4, 4],
        [3, 4, 4, 5],
        [3, 3, 4, 6],
    ]
    balanced = with_orders(schedule, (replace(o, recompute=NONE) for o in stage_orders(schedule)))
    assert adjust_partition(balanced, context) == balanced
