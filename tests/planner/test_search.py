"""Search against everything that can be counted out, against formulas, and on real schedules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.sources import UnitCosts
from penstock.planner.orders.search import Effort, gap, search
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.layout import ComputeInstruction, Order, Residency, StageLayout
from penstock.planner.schedule.memory_order import peak_bytes
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import order_times
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
)
from penstock.protocol.plan.plan import StageRange

SMALL = Effort(time_limit_s=60.0)


def _pipeline(num_devices: int, num_microbatches: int) -> StageLayout:
    """One stage of one block a device."""
    stages = tuple(StageRange(start=i, stop=i + 1, device=i) for i in range(num_devices))
    return StageLayout(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        forward=stages,
        backward=stages,
    )


def _unit(layout: StageLayout, **units: float) -> Costs:
    """Costs of a layout with one block a stage: f = 1, b = 2 unless told; 1 byte a stage."""
    return (
        UnitCosts(**units)
        .price(
            forward_stages=layout.num_blocks,
            backward_stages=layout.num_blocks,
            num_devices=layout.num_devices,
        )
        .costs
    )


def _schedule(scheme: str, num_devices: int, num_microbatches: int, num_blocks: int) -> Schedule:
    request = ScheduleRequest(
        scheme=scheme, num_devices=num_devices, num_microbatches=num_microbatches
    )
    return build_schedule(request, [1.0] * num_blocks)


def _merges(lanes: Sequence[Sequence[ComputeInstruction]]) -> Iterator[Order]:
    """Every order that keeps the order inside each lane."""
    if not any(lanes):
        yield ()
    for index, lane in enumerate(lanes):
        if lane:
            rest = [other if i != index else lane[1:] for i, other in enumerate(lanes)]
            for following in _merges(rest):
                yield (lane[0], *following)


_CHAIN = (Forward, Recompute, Backward, BackwardInput, BackwardWeight)


def _makes_sense(order: Order) -> bool:
    """Each micro-batch of a stage goes through forward, recompute, backward in this order."""
    last: dict[tuple[int, int], int] = {}
    for instruction in order:
        assert isinstance(instruction, ComputeInstruction)
        if isinstance(instruction, BackwardWeight):
            (micro_batch,) = instruction.micro_batches
        else:
            micro_batch = instruction.micro_batch
        step = _CHAIN.index(type(instruction))
        if step < last.get((instruction.stage, micro_batch), 0):
            return False
        last[instruction.stage, micro_batch] = step
    return True


def _orders_of(lanes: Sequence[Sequence[ComputeInstruction]], ascending: bool) -> Iterator[Order]:
    """Every order of a device; micro-batches of a lane in ascending order, or in any."""
    starts = [[sorted(lane, key=str)] for lane in lanes]
    if not ascending:
        starts = [list(map(list, itertools.permutations(lane))) for lane in lanes]
    for chosen in itertools.product(*starts):
        yield from filter(_makes_sense, _merges(chosen))


def _best_by_counting(
    layout: StageLayout,
    orders: Sequence[Order],
    costs: Costs,
    limit: float,
    *,
    ascending: bool = True,
) -> float:
    """The least makespan of all orders of these instructions within the limit."""
    choices = []
    for device, order in enumerate(orders):
        lanes: dict[object, list[ComputeInstruction]] = {}
        for instruction in order:
            assert isinstance(instruction, ComputeInstruction)
            lanes.setdefault((type(instruction), instruction.stage), []).append(instruction)
        alone: list[Order] = [()] * layout.num_devices
        fitting = []
        for merged in _orders_of(list(lanes.values()), ascending):
            alone[device] = merged
            if peak_bytes(layout, Residency.RESIDENT, costs, alone)[device] <= limit:
                fitting.append(merged)
        choices.append(fitting)
    best = float("inf")
    for chosen in itertools.product(*choices):
        try:
            best = min(best, order_times(layout, chosen, costs).makespan_s)
        except ValueError:
            continue
    return best


def _random_costs(num_blocks: int, seed: int) -> Costs:
    numbers = random.Random(seed)
    return Costs(
        blocks=tuple(
            BlockCost(
                forward_s=numbers.randint(1, 6),
                backward_input_s=numbers.randint(1, 6),
                backward_weight_s=numbers.randint(1, 6),
                activation_bytes=1.0,
                deferred_bytes=0.5,
            )
            for _ in range(num_blocks)
        )
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("num_devices", "num_microbatches", "limit"),
    [(2, 2, 1.0), (2, 3, 2.0), (2, 3, 9.0), (3, 2, 1.0), (3, 2, 2.0)],
)
def test_the_search_finds_what_counting_finds(
    num_devices: int, num_microbatches: int, limit: float, seed: int
) -> None:
    layout = _pipeline(num_devices, num_microbatches)
    costs = _random_costs(num_devices, seed)
    found = search(layout, costs, memory_limit_bytes=limit, effort=SMALL)
    best = _best_by_counting(layout, found.orders, costs, limit)
    assert (found.makespan_s, found.lower_bound_s, found.optimal) == (best, best, True)
    assert order_times(layout, found.orders, costs).makespan_s == best
    assert max(peak_bytes(layout, Residency.RESIDENT, costs, found.orders)) <= limit


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limit", [1.0, 1.5, 9.0])
def test_split_backwards_against_counting(limit: float, seed: int) -> None:
    layout = _pipeline(2, 2)
    costs = _random_costs(2, 100 + seed)
    found = search(layout, costs, split_backward=True, memory_limit_bytes=limit, effort=SMALL)
    best = _best_by_counting(layout, found.orders, costs, limit)
    assert (found.makespan_s, found.optimal) == (best, True)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_micro_batches_costs_nothing(seed: int) -> None:
    """Orders in which micro-batches overtake each other are not better."""
    layout = _pipeline(2, 2)
    costs = _random_costs(2, 50 + seed)
    found = search(layout, costs, memory_limit_bytes=1.0, effort=SMALL)
    assert found.makespan_s == _best_by_counting(layout, found.orders, costs, 1.0, ascending=False)


@pytest.mark.parametrize("num_microbatches", [2, 3, 4])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_1f1b_is_best_and_proved(num_devices: int, num_microbatches: int) -> None:
    """(m + p - 1) (f + b), also with the memory that it needs; GPipe takes as long without."""
    layout = _pipeline(num_devices, num_microbatches)
    costs = _unit(layout)
    expected = 3.0 * (num_microbatches + num_devices - 1)
    limit = float(min(num_devices, num_microbatches))
    found = search(layout, costs, memory_limit_bytes=limit)
    assert (found.makespan_s, found.optimal) == (expected, True)
    one = _schedule("1f1b", num_devices, num_microbatches, num_devices)
    all_forward = _schedule("gpipe", num_devices, num_microbatches, num_devices)
    for schedule in (one, all_forward):
        distance = gap(schedule, costs)
        assert (distance.makespan_s, distance.at_least, distance.at_most) == (expected, 0.0, 0.0)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(2, 4), (3, 4), (4, 8)])
def test_zero_bubble_is_best_and_proved(num_devices: int, num_microbatches: int) -> None:
    """ZB-H1: 3 m + (p - 1) (f + b - w) units with 1F1B's memory (Qi et al. 2024, table 2)."""
    schedule = _schedule("zb-h1", num_devices, num_microbatches, num_devices)
    costs = _unit(schedule.layout)
    distance = gap(schedule, costs, memory_limit_bytes=float(num_devices))
    assert distance.makespan_s == 3.0 * num_microbatches + num_devices - 1
    assert (distance.at_least, distance.at_most, distance.best.optimal) == (0.0, 0.0, True)


def test_less_memory_costs_time() -> None:
    """Proved optima of four devices and eight micro-batches that may keep 4, 3, 2 or 1."""
    layout = _pipeline(4, 8)
    costs = _unit(layout)
    whole = [search(layout, costs, memory_limit_bytes=float(limit)) for limit in (4, 3, 2, 1)]
    assert [(r.makespan_s, r.optimal) for r in whole] == [
        (33.0, True),
        (39.0, True),
        (51.0, True),
        (96.0, True),
    ]
    split = search(layout, costs, memory_limit_bytes=2.0, split_backward=True)
    assert (split.makespan_s, split.optimal) == (41.0, True)


def test_gaps_of_schedules_that_are_not_the_best() -> None:
    naive = _schedule("naive", 3, 4, 3)
    distance = gap(naive, _unit(naive.layout))
    assert (distance.makespan_s, distance.best.makespan_s) == (36.0, 18.0)
    assert (distance.at_least, distance.at_most) == (1.0, 1.0)


@pytest.mark.parametrize("scheme", ["interleaved", "chimera", "hanayo", "zb-v", "dualpipe-v"])
def test_no_scheme_beats_the_search(scheme: str) -> None:
    schedule = _schedule(scheme, 2, 4, 4)
    costs = _unit(schedule.layout)
    distance = gap(schedule, costs)
    found = distance.best
    assert found.optimal
    assert found.makespan_s <= distance.makespan_s
    assert order_times(schedule.layout, found.orders, costs).makespan_s == found.makespan_s


def test_uneven_zero_bubble_is_proved_under_its_memory() -> None:
    """With p1 longer than p2 the order of ZB-H1 is still the best within 1F1B's memory."""
    schedule = _schedule("zb-h1", 3, 6, 3)
    costs = _unit(schedule.layout, forward=1.0, backward_input=1.25, backward_weight=0.75)
    tight = gap(schedule, costs, memory_limit_bytes=3.0)
    loose = gap(schedule, costs)
    assert tight.best.optimal and loose.best.optimal
    assert tight.at_least == 0.0
    assert loose.best.makespan_s < tight.best.makespan_s


def test_recomputation_and_hops() -> None:
    """Counted out with recomputation; two hops of half a unit add one to 1F1B's nine."""
    layout = _pipeline(2, 2)
    costs = _unit(layout)
    found = search(layout, costs, recompute="full", effort=SMALL)
    best = _best_by_counting(layout, found.orders, costs, 1e9)
    assert (found.makespan_s, found.optimal) == (best, True)
    far = search(layout, costs, hop_s=0.5)
    assert (far.makespan_s, far.optimal) == (10.0, True)
    assert order_times(layout, far.orders, costs, hop_s=0.5).makespan_s == 10.0


def test_a_search_that_is_cut_short_says_what_it_knows() -> None:
    layout = _pipeline(4, 6)
    costs = _random_costs(4, 5)
    found = search(
        layout,
        costs,
        split_backward=True,
        memory_limit_bytes=2.0,
        effort=Effort(beam_width=1, max_states=3),
    )
    proved = search(layout, costs, split_backward=True, memory_limit_bytes=2.0, effort=SMALL)
    assert not found.optimal and found.states == 3
    assert found.lower_bound_s < proved.makespan_s <= found.makespan_s
    assert proved.optimal


def test_large_problems_get_a_good_order() -> None:
    layout = _pipeline(8, 16)
    found = search(layout, _unit(layout), memory_limit_bytes=8.0, effort=Effort(max_states=0))
    assert (found.makespan_s, found.optimal) == (69.0, True)


def test_impossible_limits() -> None:
    layout = _pipeline(2, 2)
    costs = _unit(layout)
    with pytest.raises(ConfigError, match=r"limit of 0\.5 bytes a device: no order exists"):
        search(layout, costs, memory_limit_bytes=0.5)
    schedule = _schedule("gpipe", 2, 4, 2)
    with pytest.raises(ConfigError, match=r"limit of 3 bytes a device: gpipe holds 4 bytes on dev"):
        gap(schedule, costs, memory_limit_bytes=3.0)
    first, second = schedule.orders
    circular = replace(schedule, orders=(first[::-1], second))
    with pytest.raises(ValueError, match="wait for each other in a circle"):
        gap(circular, costs)
