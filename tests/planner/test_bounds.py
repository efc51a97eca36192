"""The lower bound: exact where the best order is known, never above what a scheme takes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.bounds import lower_bound_s, needs_first, one_machine_s
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schedule.timing import order_times, unit_costs
from penstock.planner.schemes import SCHEMES


def make_schedule(scheme: str, devices: int, micro_batches: int, **wish: Any) -> Schedule:
    request = ScheduleRequest(
        scheme=scheme, num_devices=devices, num_microbatches=micro_batches, **wish
    )
    return build_schedule(request, [1.0] * 4 * devices)


def test_one_machine_by_hand() -> None:
    """The second comes while the first runs and has the longer tail, so the first is interrupted:
    it ends at 5, the second at 3, with 4 behind it.
    """
    assert one_machine_s([(0.0, 3.0, 1.0), (1.0, 2.0, 4.0)]) == 7.0
    assert one_machine_s([(2.0, 1.0, 0.0), (5.0, 1.0, 0.5)]) == 6.5
    assert one_machine_s([]) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_one_machine_is_the_largest_bound_of_all_sets(seed: int) -> None:
    """Smallest head + all bodies + smallest tail, over every set of jobs."""
    rng = random.Random(seed)
    jobs = [(rng.randint(0, 9), rng.randint(1, 5), rng.randint(0, 9)) for _ in range(7)]
    sets = (s for size in range(1, 8) for s in itertools.combinations(jobs, size))
    bounds = (min(j[0] for j in s) + sum(j[1] for j in s) + min(j[2] for j in s) for s in sets)
    assert one_machine_s([tuple(map(float, job)) for job in jobs]) == max(bounds)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 4), (4, 8), (8, 8)])
def test_1f1b_is_as_fast_as_its_placement_allows(p: int, m: int) -> None:
    """The last device cannot start before p - 1 forwards, and p - 1 backwards follow its work."""
    schedule = make_schedule("1f1b", p, m, recompute="none")
    costs = unit_costs(schedule.layout)
    bound = lower_bound_s(schedule.layout, schedule.orders, costs)
    assert bound == order_times(schedule.layout, schedule.orders, costs).makespan_s
    assert bound == 4 * 3.0 * (m + p - 1)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_no_scheme_is_faster(scheme: str) -> None:
    rng = random.Random(scheme)
    schedule = make_schedule(scheme, 4, 8)
    for _ in range(5):
        blocks = tuple(
            BlockCost(
                forward_s=rng.uniform(0.5, 2.0),
                recompute_s=rng.uniform(0.5, 2.0),
                backward_input_s=rng.uniform(0.5, 2.0),
                backward_weight_s=rng.uniform(0.5, 2.0),
            )
            for _ in range(16)
        )
        costs = Costs(blocks=blocks, instruction_s=0.01)
        bound = lower_bound_s(schedule.layout, schedule.orders, costs)
        taken = order_times(schedule.layout, schedule.orders, costs).makespan_s
        assert 0.0 < bound <= taken * (1 + 1e-12)


def test_a_sequence_puts_needs_first() -> None:
    assert needs_first([[2], [0], []]) == [2, 0, 1]
    with pytest.raises(ValueError, match="need each other in a circle"):
        needs_first([[1], [0]])
