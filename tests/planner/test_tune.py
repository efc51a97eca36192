"""The tuner: what it looks at, what it leaves out, and that it finds the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.sources import Prices
from penstock.planner.planning.build import ScheduleRequest
from penstock.planner.planning.overlapped_updates import choose_overlap
from penstock.planner.planning.pipeline import PlanContext, make_plan
from penstock.planner.planning.plan_search import Search, SearchOutcome, fragment, host_bytes
from penstock.planner.planning.search_space import Candidate, Space
from penstock.planner.simulate import simulate
from penstock.protocol.plan.plan import Plan
from penstock.shm.layout import TWO_COPIES, Storage

BLOCK = BlockCost(
    forward_s=1.0,
    recompute_s=1.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    output_bytes=1.0,
    activation_bytes=4.0,
    parameters=1.0,
    weight_bytes=2.0,
    device_gradient_bytes=4.0,
    gradient_bytes=2.0,
)
"""For a micro-batch of one sequence."""


def prices(micro_batch: int) -> Prices:
    """Eight blocks on a node of four devices; twice the sequences take 1.5 times as long."""
    speed = 1.5 ** (micro_batch - 1)
    block = BlockCost(
        forward_s=BLOCK.forward_s * speed,
        recompute_s=BLOCK.recompute_s * speed,
        backward_input_s=BLOCK.backward_input_s * speed,
        backward_weight_s=BLOCK.backward_weight_s * speed,
        output_bytes=BLOCK.output_bytes * micro_batch,
        activation_bytes=BLOCK.activation_bytes * micro_batch,
        parameters=BLOCK.parameters,
        weight_bytes=BLOCK.weight_bytes,
        device_gradient_bytes=BLOCK.device_gradient_bytes,
        gradient_bytes=BLOCK.gradient_bytes,
    )
    cluster = Cluster(devices_per_node=4, peer_bandwidth=1e3, fetch_bandwidth=1e3)
    return Prices(costs=Costs(blocks=(block,) * 8), cluster=cluster)


def space(**changes: object) -> Space:
    """Four devices, eight sequences a step."""
    values = {
        "num_devices": 4,
        "global_batch": 8,
        "num_blocks": 8,
        "schemes": ("gpipe", "1f1b", "mobius", "spipe"),
        "max_replicas": 1,
        "pass_sets": (),
    }
    return Space(**{**values, **changes})  # type: ignore[arg-type]


@dataclass(kw_only=True)
class Model:
    """What is searched for; ``asked`` for the blocks that are settled early, of these plans."""

    pricer: Callable[[int], Prices] = prices
    storage: Storage = TWO_COPIES
    settles: bool = False
    asked: list[Plan] = field(default_factory=list)

    def context(self, micro_batch: int) -> PlanContext:
        return PlanContext(prices=self.pricer(micro_batch))

    def plan(self, candidate: Candidate, context: PlanContext) -> Plan:
        return make_plan(candidate.request, context)

    def with_overlap(self, plan: Plan, context: PlanContext) -> Plan:
        if not self.settles:
            return plan
        self.asked.append(plan)
        return settled_early(plan, context.prices)

    def host_bytes(self, plan: Plan, context: PlanContext) -> float:
        return host_bytes(plan, context.prices, storage=self.storage)


def settled_early(plan: Plan, found: Prices) -> Plan:
    return choose_overlap(plan, PlanContext(prices=found, stops_early=True))


def searched(where: Space, storage: Storage = TWO_COPIES, **limits: float) -> Search:
    search = Search(tuned=Model(storage=storage), **limits)  # type: ignore[arg-type]
    search.run(where)
    return search


def candidate(**numbers: int) -> Candidate:
    """GPipe, micro-batches of one sequence."""
    request = ScheduleRequest(
        scheme="gpipe",
        recompute="none",
        reduce_gradients="auto",
        **numbers,  # type: ignore[arg-type]
    )
    return Candidate(request=request, micro_batch=1)


def test_the_grid_has_what_schemes_accept() -> None:
    found = space(schemes=("1f1b", "spipe"), micro_batches=(2,)).candidates()
    shown = Counter(
        (r.scheme, r.recompute, r.forward_stages, r.backward_stages, r.num_microbatches)
        for r in (candidate.request for candidate in found)
    )
    assert shown == Counter(
        [
            ("1f1b", "none", 4, 4, 4),
            ("1f1b", "full", 4, 4, 4),
            ("spipe", "full", 4, 4, 4),
            ("spipe", "full", 4, 8, 4),
            ("spipe", "full", 8, 8, 4),
        ]
    )


def test_replicas_and_micro_batches_divide_the_batch() -> None:
    found = space(schemes=("gpipe",), recomputations=(("none", ()),), max_replicas=None)
    sizes = [
        (c.request.num_devices, c.request.replicas, c.micro_batch, c.request.num_microbatches)
        for c in found.candidates()
    ]
    assert sorted(sizes) == sorted(
        (4 // replicas, replicas, size, 8 // replicas // size)
        for replicas in (1, 2, 4)
        for size in (1, 2, 4, 8)
        if size * replicas <= 8
    )


def test_the_fastest_is_found_and_the_rest_is_sorted() -> None:
    search = searched(space())
    times = [outcome.step_s for outcome in search.outcomes]
    assert times == sorted(times)
    assert search.best is not None
    # Without limits: keep everything, two stages a device against bubbles, larger micro-batches.
    best = search.best.candidate
    assert (best.request.scheme, best.request.recompute, best.micro_batch) == ("mobius", "none", 2)
    assert (best.request.forward_stages, search.best.step_s) == (
        8,
        pytest.approx(2 * 4 * 4.5 + 3 * 4.5, rel=0.01),
    )
    everything = searched(space(), keep=1000)
    assert everything.best == search.best
    assert set(everything.left_out) == {"the same"}


def test_leaving_out_the_slow_changes_nothing() -> None:
    all_of_them, few = searched(space(), keep=1000), searched(space(), keep=3)
    assert few.outcomes == all_of_them.outcomes[:3]
    assert few.left_out["slower"] > 0


def test_two_searches_give_the_same() -> None:
    where = space(pass_sets=(("2bp",),), max_replicas=None)
    assert searched(where).outcomes == searched(where).outcomes


def saturated(micro_batch: int) -> Prices:
    """Two parameters a block, advances of 60/14 each."""
    costs, cluster = prices(micro_batch).costs, prices(micro_batch).cluster
    return Prices(
        costs=replace(costs, blocks=tuple(replace(b, parameters=2.0) for b in costs.blocks)),
        cluster=replace(cluster, dram_bandwidth=14.0),
    )


def test_the_winner_is_the_fastest_with_the_blocks_settled_early_that_shorten_it() -> None:
    """Where all blocks advance mobius wins; its tail is the shorter one."""
    where = space(schemes=("spipe", "mobius", "zb-h1"), micro_batches=(2,))
    model = Model(pricer=saturated, settles=True)
    advancing, settling = Search(tuned=Model(pricer=saturated)), Search(tuned=model)
    for search in (advancing, settling):
        search.run(where)
    assert advancing.best is not None and settling.best is not None
    schemes = [search.best.candidate.request.scheme for search in (advancing, settling)]
    assert schemes == ["mobius", "zb-h1"]
    settled = [settled_early(o.plan, saturated(2)) for o in advancing.outcomes]
    steps = [
        simulate(plan, saturated(2).costs, saturated(2).cluster).makespan_s for plan in settled
    ]
    assert settling.best.step_s == min(steps) < 0.97 * steps[0]
    assert settling.best.plan == settled[steps.index(min(steps))]
    assert len(model.asked) < len(advancing.outcomes), "those that cannot win are left alone"


def test_memory_limits_decide() -> None:
    roomy = searched(space(), keep=1000)
    least = min(outcome.device_bytes for outcome in roomy.outcomes)
    tight = searched(space(), keep=1000, device_bytes=least)
    assert [o.device_bytes for o in tight.outcomes] == [least] * len(tight.outcomes)
    assert set(tight.left_out) <= {"device memory", "the same"}
    assert sum(tight.left_out.values()) + len(tight.outcomes) == len(space().candidates())
    assert tight.best is not None and tight.best.candidate.request.recompute == "full"
    # Eight blocks: two copies of weights and gradients, 12 bytes of master weight and moments.
    assert {o.host_bytes for o in roomy.outcomes} == {8 * (2 * 2 + 2 * 2 + 12)}
    small = searched(space(), Storage(split_master=True, single_gradients=tuple(range(8))))
    assert {o.host_bytes for o in small.outcomes} == {8 * (2 * 2 + 2 + 10)}
    none = searched(space(), host_bytes=159.0)
    assert none.best is None and set(none.left_out) == {"host memory"}


def test_passes_are_tried_on_the_best() -> None:
    search = searched(space(schemes=("1f1b",), pass_sets=(("2bp",), ("mario",))))
    assert search.best is not None
    assert search.best.candidate.request.passes == ("2bp",)
    plain = [o for o in search.outcomes if not o.candidate.request.passes]
    assert search.best.step_s < plain[0].step_s


def test_the_fragment_says_what_was_found() -> None:
    search = searched(space(schemes=("spipe",), micro_batches=(1,)))
    assert search.best is not None
    assert fragment(search.best.candidate) == {
        "train": {"micro_batch": 1},
        "schedule": {
            "scheme": "spipe",
            "forward_stages": 8,
            "backward_stages": 8,
            "recompute": "full",
        },
    }


def test_progress_counts_to_the_end() -> None:
    calls: list[tuple[int, int, SearchOutcome | None]] = []
    search = Search(tuned=Model())
    search.run(space(schemes=("gpipe",)), lambda *call: calls.append(call))
    dones = [done for done, _, _ in calls]
    assert dones == list(range(len(calls)))
    assert calls[0] == (0, len(calls) - 1, None)
    assert calls[-1] == (len(calls) - 1, len(calls) - 1, search.best)


def test_impossible_candidates_are_counted() -> None:
    search = Search(tuned=Model())
    search.consider(
        candidate(
            num_devices=4,
            replicas=1,
            num_microbatches=8,
            forward_stages=5,
            backward_stages=5,
        )
    )
    assert (search.outcomes, search.left_out) == ([], {"impossible": 1})


def test_replicas_are_routes_of_one_plan() -> None:
    search = Search(tuned=Model())
    search.consider(
        candidate(
            num_devices=2,
            replicas=2,
            num_microbatches=4,
            forward_stages=2,
            backward_stages=2,
        )
    )
    [outcome] = search.outcomes
    assert (outcome.plan.num_devices, outcome.plan.num_routes) == (4, 2)
    assert outcome.step_s == pytest.approx(12.0 * 5, rel=0.01)
    # Each replica has its own gradients, two copies of 2 bytes for each of 8 blocks.
    assert outcome.host_bytes == 8 * (2 * 2 + 12) + 2 * 8 * 2 * 2
    assert fragment(outcome.candidate)["schedule"]["replicas"] == 2
