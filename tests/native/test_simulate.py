"""The simulator's event core: exact small graphs, and rules that every run obeys."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isnan
from typing import Any

import numpy as np
import pytest

from penstock import _native


@dataclass(slots=True, kw_only=True)
class Graph:
    """Tasks added one by one; queues serve them in the order of adding."""

    capacities: Sequence[float] = ()
    routes: Sequence[tuple[float, tuple[int, ...]]] = ()
    tasks: list[tuple[float, float, int, float, bool]] = field(default_factory=list)
    queues: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self,
        queue: str,
        seconds: float = 0.0,
        *,
        amount: float = 0.0,
        route: int = -1,
        delay: float = 0.0,
        unordered: bool = False,
        after: Sequence[int] = (),
    ) -> int:
        task = len(self.tasks)
        self.tasks.append((seconds, amount, route, delay, unordered))
        self.queues[queue].append(task)
        self.edges += [(task, needed) for needed in after]
        return task

    def arguments(self) -> dict[str, Any]:
        seconds, amounts, routes, delays, unordered = zip(*self.tasks, strict=True)
        served = list(self.queues.values())
        crossed = [resources for _, resources in self.routes]
        edges = np.array(self.edges, dtype=np.int32).reshape(-1, 2).T.copy()
        return {
            "seconds": np.array(seconds, dtype=np.float64),
            "amounts": np.array(amounts, dtype=np.float64),
            "delays": np.array(delays, dtype=np.float64),
            "routes": np.array(routes, dtype=np.int32),
            "unordered": np.array(unordered, dtype=np.uint8),
            "edge_tasks": edges[0],
            "edge_needs": edges[1],
            "queue_offsets": _offsets(served),
            "queue_tasks": np.array([t for queue in served for t in queue], dtype=np.int32),
            "route_limits": np.array([limit for limit, _ in self.routes], dtype=np.float64),
            "route_offsets": _offsets(crossed),
            "route_resources": np.array([r for rs in crossed for r in rs], dtype=np.int32),
            "capacities": np.array(self.capacities, dtype=np.float64),
        }

    def run(self) -> list[tuple[float, float]]:
        starts, ends, _ = _native.simulate_tasks(**self.arguments())
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _offsets(lists: Sequence[Sequence[int]]) -> Any:
    return np.concatenate(([0], np.cumsum([len(one) for one in lists]))).astype(np.int64)


def test_a_queue_serves_its_tasks_in_order_one_at_a_time() -> None:
    """The second waits for its turn though it is ready; the third for the other queue's task."""
    graph = Graph()
    first = graph.add("a", 2.0)
    graph.add("a", 1.0)
    other = graph.add("b", 5.0, after=[first])
    graph.add("a", 1.0, after=[other])
    graph.add("a", 1.0)
    assert graph.run() == [(0.0, 2.0), (2.0, 3.0), (2.0, 7.0), (7.0, 8.0), (8.0, 9.0)]


def test_a_delay_holds_up_dependents_and_not_the_queue() -> None:
    graph = Graph()
    sent = graph.add("link", 1.0, delay=0.5)
    graph.add("link", 1.0)
    graph.add("compute", 1.0, after=[sent])
    assert graph.run() == [(0.0, 1.0), (1.0, 2.0), (1.5, 2.5)]


def test_unordered_tasks_start_as_they_become_ready() -> None:
    """The last to be added is ready first; of two that are ready at the same time, the earlier
    added starts.
    """
    graph = Graph()
    gradients = [graph.add("device", 1.0) for _ in range(3)]
    graph.add("optimizer", 5.0, unordered=True, after=[gradients[1]])
    graph.add("optimizer", 5.0, unordered=True, after=[gradients[1]])
    graph.add("optimizer", 5.0, unordered=True, after=[gradients[0]])
    assert graph.run()[3:] == [(6.0, 11.0), (11.0, 16.0), (1.0, 6.0)]


def test_unordered_tasks_fill_gaps_between_ordered_ones() -> None:
    """The kernel is ready from the start; both computations that are ready then go first."""
    graph = Graph()
    far = graph.add("other", 4.0)
    graph.add("stream", 1.0)
    graph.add("stream", 1.0)
    graph.add("stream", 1.0, after=[far])
    graph.add("stream", 1.0, unordered=True)
    assert graph.run()[1:] == [(0.0, 1.0), (1.0, 2.0), (4.0, 5.0), (2.0, 3.0)]


def test_two_flows_share_a_switch() -> None:
    """Capacity 10, limits 8. Alone 8 till the second starts at 2, then 5 each: the first has moved
    16 by then and ends at 2 + 24 / 5; the second, with 24 of its 40 moved, goes on with 8.
    """
    graph = Graph(capacities=[10.0], routes=[(8.0, (0,))])
    graph.add("a", amount=40.0, route=0)
    graph.add("b", 2.0, amount=40.0, route=0)
    first, second = graph.run()
    assert first == (0.0, pytest.approx(6.8))
    assert second == (0.0, pytest.approx(8.8))


def test_what_a_narrow_flow_leaves_goes_to_the_others() -> None:
    """Max-min: limits 1, 6 and 6 share 10 as 1, 4.5 and 4.5."""
    graph = Graph(capacities=[10.0], routes=[(1.0, (0,)), (6.0, (0,))])
    graph.add("a", amount=1.0, route=0)
    graph.add("b", amount=4.5, route=1)
    graph.add("c", amount=4.5, route=1)
    assert [end for _, end in graph.run()] == [pytest.approx(1.0)] * 3


def test_a_bottleneck_elsewhere_frees_the_shared_resource() -> None:
    """The first two share 4 as 2 each; so the third gets 8 of the 10 it shares with the second."""
    graph = Graph(capacities=[4.0, 10.0], routes=[(inf, (0,)), (inf, (0, 1)), (inf, (1,))])
    for route in range(3):
        graph.add(str(route), amount=8.0, route=route)
    assert [end for _, end in graph.run()] == [4.0, 4.0, 1.0]


def test_a_route_that_crosses_twice_uses_twice() -> None:
    """Through host memory: written and read. Alone half of 8; beside a fetch 8 / 3 each."""
    graph = Graph(capacities=[8.0], routes=[(inf, (0, 0)), (inf, (0,))])
    graph.add("a", amount=4.0, route=0)
    through = graph.add("b", amount=8.0, route=0, after=[0])
    graph.add("c", amount=8.0, route=1, after=[0])
    assert graph.run()[0] == (0.0, 1.0)
    assert graph.run()[through] == (1.0, pytest.approx(4.0))


def test_without_resources_the_limit_is_the_rate() -> None:
    graph = Graph(routes=[(4.0, ()), (inf, ())])
    graph.add("a", 1.0, amount=2.0, route=0)
    graph.add("b", 1.0, amount=2.0, route=1)
    assert graph.run() == [(0.0, 1.5), (0.0, 1.0)]


def test_tasks_that_wait_for_each_other_never_start() -> None:
    graph = Graph()
    graph.add("a", 1.0, after=[2])
    graph.add("b", 1.0)
    graph.add("a", 1.0)
    times = graph.run()
    assert times[1] == (0.0, 1.0)
    assert all(isnan(time) for task in (0, 2) for time in times[task])


def test_nothing_to_do() -> None:
    graph = Graph()
    graph.add("a")
    arguments = {
        name: values[:0] if name not in ("queue_offsets", "route_offsets") else values[:1]
        for name, values in graph.arguments().items()
    }
    starts, ends, rates = _native.simulate_tasks(**arguments)
    assert (starts.tolist(), ends.tolist(), rates) == ([], [], [])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seconds", [-1.0, 0.0], r"seconds\[0\] is -1\.0+: expected a finite number, at least 0"),
        ("amounts", [1.0, inf], r"amounts\[1\] is inf"),
        ("delays", [float("nan"), 0.0], r"delays\[0\] is -?nan"),
        ("delays", [0.0], "delays has 1 elements, expected 2"),
        ("routes", [0, 1], r"routes\[1\] is 1: expected -1 or more and below 1"),
        ("routes", [0, -1], r"routes\[1\] is -1: a task whose amount is not 0 needs a route"),
        ("edge_tasks", [2], r"edge_tasks\[0\] is 2: expected 0 or more and below 2"),
        ("edge_needs", [-1], r"edge_needs\[0\] is -1"),
        ("edge_needs", [], "edge_needs has 0 elements, expected 1"),
        ("queue_offsets", [0, 1], "queue_offsets must start at 0 and end at 2"),
        ("queue_offsets", [0, 2, 1, 2], r"queue_offsets\[2\] is 1: offsets must not fall"),
        ("queue_tasks", [0, 0], r"queue_tasks\[1\] is 0: it is in a queue already"),
        ("route_limits", [0.0], r"route_limits\[0\] is 0\.0+: expected a number above 0"),
        ("route_offsets", [0], "route_offsets has 1 elements, expected 2"),
        ("route_resources", [1], r"route_resources\[0\] is 1: expected 0 or more and below 1"),
        ("capacities", [-2.0], r"capacities\[0\] is -2"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: list[float], message: str) -> None:
    graph = Graph(capacities=[1.0], routes=[(1.0, (0,))])
    graph.add("a", amount=1.0, route=0)
    graph.add("a", amount=1.0, route=0, after=[0])
    arguments = graph.arguments()
    arguments[name] = np.array(value, dtype=arguments[name].dtype)
    with pytest.raises(ValueError, match=message):
        _native.simulate_tasks(**arguments)


def test_other_types_are_refused() -> None:
    graph = Graph()
    graph.add("a", 1.0)
    with pytest.raises(TypeError):
        _native.simulate_tasks(**{**graph.arguments(), "seconds": np.zeros(1, dtype=np.float32)})


def random_graph(seed: int) -> Graph:
    """Tasks of all kinds on a few queues, without circles: they need earlier ones only."""
    rng = random.Random(seed)
    num_resources = rng.randint(1, 5)
    routes = [
        (
            rng.choice([inf, rng.uniform(1.0, 9.0)]),
            tuple(rng.choices(range(num_resources), k=rng.randint(1, 3))),
        )
        for _ in range(6)
    ]
    graph = Graph(
        capacities=[rng.choice([2.0, 5.0, 10.0]) for _ in range(num_resources)], routes=routes
    )
    for task in range(60):
        flows = rng.random() < 0.7
        graph.add(
            rng.choice("abcdefgh"),
            rng.choice([0.0, rng.uniform(0.0, 2.0)]),
            amount=rng.choice([0.0, rng.uniform(0.0, 20.0)]) if flows else 0.0,
            route=rng.randrange(6) if flows else -1,
            delay=rng.choice([0.0, 0.5]),
            unordered=rng.random() < 0.3,
            after=[rng.randrange(task) for _ in range(rng.randint(0, 2)) if task],
        )
    return graph


@pytest.mark.parametrize("seed", range(40))
def test_queues_and_dependencies_are_obeyed(seed: int) -> None:
    graph = random_graph(seed)
    times = graph.run()
    assert times == graph.run()
    for task, needed in graph.edges:
        assert times[task][0] >= times[needed][1] + graph.tasks[needed][3]
    for served in graph.queues.values():
        in_time = sorted(served, key=lambda task: (times[task], task))
        assert all(times[a][1] <= times[b][0] for a, b in pairwise(in_time))
        ordered = [task for task in in_time if not graph.tasks[task][4]]
        starts = [times[task][0] for task in ordered]
        assert [times[task][0] for task in sorted(ordered)] == starts


@pytest.mark.parametrize("seed", range(40))
def test_no_resource_is_exceeded_and_every_flow_has_a_reason_for_its_rate(seed: int) -> None:
    """At every moment: no resource over its capacity; each flow runs at its limit, or crosses a
    full resource on which no other flow is faster. Each moves its amount.
    """
    graph = random_graph(seed)
    _, ends, changes = _native.simulate_tasks(**graph.arguments(), record_rates=True)
    rates: dict[int, float] = {}
    moved: dict[int, float] = defaultdict(float)
    for (now, task, rate), (later, _, _) in pairwise([*changes, (float(np.max(ends)), -1, 0.0)]):
        rates[task] = rate
        if later > now:
            _check_fair(graph, {t: r for t, r in rates.items() if r > 0.0})
        for flow, its_rate in rates.items():
            moved[flow] += its_rate * (later - now)
    amounts = {t: amount for t, (_, amount, _, _, _) in enumerate(graph.tasks) if amount > 0.0}
    assert amounts
    assert moved == pytest.approx(amounts)


def _check_fair(graph: Graph, rates: dict[int, float]) -> None:
    used = [0.0] * len(graph.capacities)
    fastest = [0.0] * len(graph.capacities)
    for task, rate in rates.items():
        for resource in graph.routes[graph.tasks[task][2]][1]:
            used[resource] += rate
            fastest[resource] = max(fastest[resource], rate)
    for there, capacity in zip(used, graph.capacities, strict=True):
        assert there <= capacity * (1 + 1e-9)
    for task, rate in rates.items():
        limit, resources = graph.routes[graph.tasks[task][2]]
        full = (
            used[r] >= graph.capacities[r] * (1 - 1e-9) and rate >= fastest[r] * (1 - 1e-9)
            for r in resources
        )
        assert rate == pytest.approx(limit) or any(full)
