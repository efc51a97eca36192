"""Who sums the gradients of several routes."""

from __future__ import annotations

import pytest

from penstock.host.errors import ConfigError
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.plan.layout import StageLayout
from penstock.protocol.plan.plan import StageRange
from penstock.protocol.plan.reduction import Reduction, spans_nodes


def stages(*routes: tuple[tuple[int, int], ...]) -> StageLayout:
    """Routes of (blocks of a stage, device)."""
    found = []
    for route in routes:
        start = 0
        for count, device in route:
            found.append(StageRange(start=start, stop=start + count, device=device))
            start += count
    return StageLayout(
        num_devices=4, num_microbatches=4, forward=tuple(found), backward=tuple(found)
    )


THREE = stages(((1, 0), (2, 0), (1, 1)), ((1, 1), (2, 2), (1, 2)), ((1, 3), (2, 3), (1, 0)))
"""Three routes of three stages: backward stages 0-2, 3-5, 6-8."""


def reduction(layout: StageLayout, *, reduces: bool = True, shards: bool = False) -> Reduction:
    programs = parse_program("device 0: RD 0; OG 0" if reduces else "device 0: OG 0")
    return Reduction.in_programs(layout, programs, shards_weights=shards)


def test_without_reductions_each_route_publishes_and_the_first_owns() -> None:
    found = reduction(THREE, reduces=False)
    assert (found.reduces, found.roots) == (False, tuple(range(9)))
    assert [found.published_route(stage) for stage in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.published_devices == ((0, 0, 0, 1), (1, 2, 2, 2), (3, 3, 3, 0))
    assert [found.owner_device(block) for block in range(4)] == [0, 0, 0, 1]
    assert not any(found.senders(stage) for stage in range(9))


def test_the_first_route_sums() -> None:
    found = reduction(THREE)
    assert found.roots == (0, 1, 2) * 3
    assert [found.senders(stage) for stage in range(9)] == [(3, 6), (4, 7), (5, 8)] + [()] * 6
    assert [found.published_route(stage) for stage in range(9)] == [0] * 9
    assert found.published_devices == ((0, 0, 0, 1),)


def test_where_weights_are_shared_out_roots_take_turns() -> None:
    found = reduction(THREE, shards=True)
    assert found.roots == (0, 4, 8) * 3
    assert (found.senders(0), found.senders(4), found.senders(8)) == ((3, 6), (1, 7), (2, 5))
    assert [stage for stage in range(9) if found.publishes(stage)] == [0, 4, 8]
    assert [found.owner_device(block) for block in range(4)] == [0, 2, 2, 0]


def test_one_route_has_nothing_to_sum() -> None:
    assert not reduction(stages(((2, 0), (2, 1)))).reduces


def test_routes_that_do_not_fit_together() -> None:
    cut = stages(((2, 0), (2, 1)), ((1, 2), (3, 3)))
    with pytest.raises(ConfigError, match=r"cut alike; blocks \[0, 2\) are a stage of 1"):
        reduction(cut)
    assert not spans_nodes(cut, devices_per_node=2)
    shared = stages(((2, 0), (2, 1)), ((2, 0), (2, 2)))
    with pytest.raises(ConfigError, match=r"backward stages \[0, 2\] of different routes share"):
        reduction(shared)
    assert reduction(shared, reduces=False).published_devices == ((0, 0, 1, 1), (0, 0, 2, 2))


@pytest.mark.parametrize(("devices_per_node", "spans"), [(1, True), (2, True), (4, False)])
def test_routes_on_several_nodes(devices_per_node: int, spans: bool) -> None:
    assert spans_nodes(THREE, devices_per_node) is spans
