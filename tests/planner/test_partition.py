"""Cuts are exact: compared with all cuts of small lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.schedule.layout import partition


def sizes(costs: Sequence[float], num_stages: int) -> list[int]:
    return [len(stage) for stage in partition(costs, num_stages)]


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1.0] * 8, 4, [2, 2, 2, 2]),
        ([1.0] * 8, 3, [2, 3, 3]),
        ([1.0] * 10, 4, [2, 2, 3, 3]),
        ([0.0] + [1.0] * 8 + [2.0], 4, [3, 2, 3, 2]),
        ([1.0] * 8 + [10.0], 3, [4, 4, 1]),
        ([5.0], 1, [1]),
        ([0.0, 0.0], 2, [1, 1]),
    ],
)
def test_sizes(costs: list[float], num_stages: int, expected: list[int]) -> None:
    """Ties: earlier stages smaller; one heavy block leaves the rest balanced."""
    assert sizes(costs, num_stages) == expected


def _key(costs: Sequence[int], cuts: Sequence[int]) -> tuple[int, int, list[int]]:
    bounds = [0, *cuts, len(costs)]
    stages = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    lengths = [b - a for a, b in pairwise(bounds)]
    return max(stages), sum(s * s for s in stages), lengths


@given(st.lists(st.sampled_from([0, 1, 2, 3, 8]), min_size=1, max_size=8), st.data())
def test_no_cut_is_better(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    best = min(_key(costs, cut) for cut in cuts)
    found = [stage.start for stage in partition(costs, num_stages)][1:]
    assert _key(costs, found)[0] == best[0]
    if sum(costs) in (0, 1, 2, 4, 8, 16, 32):
        assert _key(costs, found) == best


def test_forty_blocks_into_many_stages() -> None:
    assert sizes([1.0] * 40, 12) == [3] * 8 + [4] * 4


@pytest.mark.parametrize("num_stages", [0, 4])
def test_impossible_numbers_of_stages(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"cannot cut 3 blocks into {num_stages} stages"):
        partition([1.0] * 3, num_stages)
