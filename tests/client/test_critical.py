"""Where a step went, and what would be saved, on attempts whose times are known: simulated ones."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from penstock.planner.cost.cluster import ADVANCE, Cluster
from penstock.planner.cost.costs import Costs
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import lower
from penstock.planner.simulate import Simulation, simulate
from penstock.planner.traces.critical_path import CriticalPath, critical_path
from penstock.planner.traces.dependency_graph import Resource
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.what_if import CostSource, Pricing, Savings, savings
from penstock.protocol.plan.plan import Plan
from tests.client.test_trace import (
    BLOCK,
    CLUSTER,
    DECISION_S,
    LAUNCH_S,
    NUM_BLOCKS,
    PLANS,
    FakeRun,
)

COSTS = Costs(blocks=(BLOCK,) * NUM_BLOCKS, instruction_s=0.001)


def analysed(
    path: Path, plan: Plan, cluster: Cluster, costs: Costs = COSTS, nodes: str = "a"
) -> tuple[Simulation, CriticalPath, Savings]:
    """A run that goes as simulated: its path, and savings by costs that are fitted to it."""
    path.mkdir(exist_ok=True)
    simulation = simulate(plan, costs, cluster, stops_early=True)
    run = FakeRun(path, plan, simulation, nodes)
    for attempt in range(1, 4):
        run.write(attempt)
    attempt = run.attempts[1]
    fit = Fit.of([attempt], cluster.devices_per_node)
    found = critical_path(attempt, fit)
    assert found.step_s == pytest.approx(attempt.step_s, abs=1e-9)
    assert sum(found.seconds.values()) == pytest.approx(found.step_s, abs=1e-9)
    return simulation, found, savings(plan, Pricing.of_fit(fit), found)


@pytest.mark.parametrize("name", list(PLANS))
def test_every_second_of_a_step_is_on_one_resource(name: str, tmp_path: Path) -> None:
    simulation, path, saved = analysed(tmp_path, PLANS[name], CLUSTER)
    outside_s = path.seconds[Resource.SCHEDULER] + path.seconds[Resource.OVERHEAD]
    assert path.seconds[Resource.SCHEDULER] >= DECISION_S - 1e-6
    assert outside_s == pytest.approx(LAUNCH_S + DECISION_S, abs=0.01 * path.step_s)
    assert path.seconds[Resource.OPTIMIZER] >= 0.99 * simulation.optimizer_tail_s - 0.004
    bounds = zip(path.stretches, path.stretches[1:], strict=False)
    assert all(one.end_s == other.start_s for one, other in bounds), "no gaps"
    assert saved.simulated_s == pytest.approx(simulation.makespan_s, rel=1e-3)
    assert max(saved.seconds.values()) <= saved.together_s <= path.step_s


SLOW = {
    Resource.PEER_LINKS: {"peer_bandwidth": 0.05},
    Resource.D2H: {"offload_bandwidth": 0.015},
    Resource.OPTIMIZER: {"optimizer_rate": 0.05},
    Resource.COMPUTE: {},
}


@pytest.mark.parametrize("resource", list(SLOW))
@pytest.mark.parametrize("name", ["1f1b", "spipe"])
def test_without_a_resource_a_step_is_shorter_by_what_was_said(
    name: str, resource: Resource, tmp_path: Path
) -> None:
    """Costs are known by measurement alone, and say what the true ones say."""
    cluster = dataclasses.replace(CLUSTER, **SLOW[resource])
    simulation, path, saved = analysed(tmp_path, PLANS[name], cluster)
    truth = Pricing(costs=COSTS, cluster=cluster, optimizer=ADVANCE, source=CostSource.PROFILE)
    without = truth.without((resource,)).simulate(PLANS[name])
    really_s = simulation.makespan_s - without.makespan_s
    assert really_s > 0.1 * simulation.makespan_s, "it holds the step back"
    assert saved.seconds[resource] == pytest.approx(really_s, abs=0.03 * simulation.makespan_s)
    assert resource in saved.critical
    assert path.seconds[resource] >= 0.1 * path.step_s


def test_between_nodes_it_is_the_network(tmp_path: Path) -> None:
    request = ScheduleRequest(
        scheme="spipe", num_devices=4, num_microbatches=8, forward_stages=4, backward_stages=8
    )
    plan = lower(build_schedule(request, [1.0] * NUM_BLOCKS))
    block = dataclasses.replace(BLOCK, weight_bytes=0.064)
    costs = Costs(blocks=(block,) * NUM_BLOCKS, instruction_s=0.001)
    cluster = dataclasses.replace(CLUSTER, fetch_bandwidth=4.0, nic_bandwidth=0.1)
    _, path, saved = analysed(tmp_path, plan, cluster, costs, "ab")
    assert path.seconds[Resource.NETWORK] > 0.3 * path.step_s
    assert saved.seconds[Resource.NETWORK] > 0.2 * path.step_s
    assert {place for resource, place in path.places if resource is Resource.OPTIMIZER} <= {
        *("optimizer 0", "optimizer 1")
    }


def test_what_two_resources_save_together_is_not_the_sum(tmp_path: Path) -> None:
    """Sweeps and offloads take as long as each other and run side by side: without one of them the
    other still takes its time.
    """
    cluster = dataclasses.replace(CLUSTER, offload_bandwidth=0.02, optimizer_rate=0.04)
    _, _, saved = analysed(tmp_path, PLANS["1f1b"], cluster)
    both = (Resource.D2H, Resource.OPTIMIZER)
    assert set(both) <= set(saved.critical)
    alone_s = sum(saved.seconds[resource] for resource in both)
    assert saved.together_s > 1.2 * alone_s


@pytest.mark.slow
def test_an_attempt_of_many_devices_is_analysed_in_less_than_two_seconds(tmp_path: Path) -> None:
    request = ScheduleRequest(scheme="1f1b", num_devices=64, num_microbatches=64)
    plan = lower(build_schedule(request, [1.0] * 64))
    costs = Costs(blocks=(BLOCK,) * 64, instruction_s=0.001)
    cluster = dataclasses.replace(CLUSTER, devices_per_node=64)
    run = FakeRun(tmp_path, plan, simulate(plan, costs, cluster, stops_early=True))
    run.write(1)
    run.write(2)
    attempt = run.attempts[0]
    begun_s = time.process_time()
    fit = Fit.of([attempt], 64)
    path = critical_path(attempt, fit)
    savings(plan, Pricing.of_fit(fit), path)
    seconds = time.process_time() - begun_s
    print(f"{sum(map(len, plan.programs))} instructions analysed in {seconds:.2f} s of a core")
    assert seconds < 2.0
