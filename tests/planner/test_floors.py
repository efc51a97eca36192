"""What a search may leave out: floors are below whatever is planned and simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.cost.analytic import analytic_costs
from penstock.planner.cost.frameworks import MEGATRON_DEEPSPEED
from penstock.planner.cost.sources import Prices
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.planning.lower_bounds import Floors, ordered
from penstock.planner.planning.pipeline import PlanContext, make_plan
from penstock.planner.planning.search_space import Candidate, Space, known_pass_sets
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import simulate


def context(stops_early: bool) -> PlanContext:
    """Six layers of a small model, on one node."""
    found = analytic_costs(
        "A100-40",
        "gpt3-350m",
        sequence_length=1024,
        micro_batch=2,
        layers=6,
        framework=MEGATRON_DEEPSPEED,
    )
    prices = Prices(costs=found.costs, cluster=found.cluster)
    return PlanContext(prices=prices, stops_early=stops_early)


def candidates(scheme: str, passes: tuple[str, ...] = ()) -> list[Candidate]:
    """On four devices, eight micro-batches and fewer."""
    space = Space(
        num_devices=4,
        global_batch=16,
        num_blocks=8,
        schemes=(scheme,),
        micro_batches=(2,),
        stages_per_device=(1, 2),
        backward_per_forward=(1, 2),
        passes=passes,
    )
    return list(space.candidates())


@pytest.mark.parametrize("stops_early", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_plan_beats_its_floors(scheme: str, stops_early: bool) -> None:
    where = context(stops_early)
    floors = Floors(context=where)
    for one in candidates(scheme):
        plan = make_plan(one.request, where)
        found = ordered(one, where)
        unknown_s = floors.seconds(one)
        floors.splits[scheme] = found.splits
        prices = where.prices
        step_s = simulate(
            plan, prices.costs, prices.cluster, stops_early=stops_early
        ).pipeline_s * (1 + 1e-9)
        assert unknown_s <= floors.seconds(one) <= step_s, one
        assert found.seconds <= step_s, one
        needed = max(peak.total_bytes for peak in device_peaks(plan, prices.costs))
        assert found.device_bytes <= needed * (1 + 1e-9), one
        assert floors.device_bytes(one) <= needed * (1 + 1e-9), one


@pytest.mark.parametrize("passes", known_pass_sets(), ids="+".join)
def test_no_pass_beats_the_floor(passes: tuple[str, ...]) -> None:
    where = replace(context(stops_early=True), memory_limit_bytes=4e9)
    floors = Floors(context=where, splits={"1f1b": False, "interleaved": False, "zb-h1": True})
    tried = 0
    for scheme in ("1f1b", "interleaved", "zb-h1"):
        for one in candidates(scheme, passes)[::3]:
            try:
                plan = make_plan(one.request, where)
            except ConfigError:
                continue
            found = simulate(plan, where.prices.costs, where.prices.cluster, stops_early=True)
            assert floors.seconds(one) <= found.pipeline_s * (1 + 1e-9), one
            tried += 1
    assert tried or passes[0] in ("obscura", "match-stages"), "these need other schemes"


def test_the_floor_of_1f1b_is_what_it_takes() -> None:
    """Its order has no bubbles but those that nothing can avoid."""
    where = context(stops_early=False)
    floors = Floors(context=where, splits={"1f1b": False})
    for one in candidates("1f1b"):
        if one.request.recompute == "none":
            assert floors.seconds(one) > 0.93 * ordered(one, where).seconds
