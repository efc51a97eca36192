"""Outcomes that tests have pinned elsewhere: plans, planned runs, undisturbed simulations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.planner.schemes import SCHEMES
from tests.node import test_planned_runs as planned_runs
from tests.pins.comparing import Comparison, compared, counted, read, shared_out
from tests.planner import test_same_plans as same_plans
from tests.simulation.results import GOLDEN as UNDISTURBED


def compare_plans(seeds: int) -> Comparison:
    """Plans, simulations and memory of all schemes, passes and configurations."""
    return compared(flattened(read(same_plans.GOLDEN)), flattened(_plans()))


def rewrite_plans(seeds: int) -> None:
    """Stores plans, as ``python -m tests.planner.test_same_plans`` does."""
    same_plans.main()


def compare_planned_runs(seeds: int) -> Comparison:
    """Configurations, plans and needs that a start resolves."""
    current = {name: planned_runs.planned(case) for name, case in planned_runs.CASES.items()}
    return compared(flattened(read(planned_runs.GOLDEN)), flattened(current))


def rewrite_planned_runs(seeds: int) -> None:
    """Stores planned runs, as ``python -m tests.node.test_planned_runs`` does."""
    planned_runs.rewrite()


def compare_undisturbed(seeds: int) -> Comparison:
    """States and metrics that each simulated shape leaves without faults."""
    return compared(read(UNDISTURBED), _undisturbed())


def rewrite_undisturbed(seeds: int) -> None:
    """Stores what shapes leave without faults."""
    UNDISTURBED.write_text(json.dumps(_undisturbed(), indent=1) + "\n", encoding="utf-8")


def flattened(content: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Returns the leaves of nested mappings, by the names on the way to them."""
    leaves: dict[str, str] = {}
    for name, value in content.items():
        path = f"{above}, {name}" if above else name
        leaves |= flattened(value, path) if isinstance(value, dict) else {path: str(value)}
    return leaves


def _plans() -> dict[str, Any]:
    texts = shared_out(_schemes, tuple(SCHEMES))
    configurations = same_plans.configurations().items()
    return {
        "schemes": {scheme: json.loads(text) for scheme, text in texts.items()},
        "configurations": {
            name: same_plans.hashes_of_configuration(*pair) for name, pair in configurations
        },
    }


def _schemes(job: int, schemes: Sequence[str]) -> dict[str, str]:
    return {
        scheme: json.dumps(same_plans.hashes_of_scheme(scheme))
        for scheme in counted("plans", job, schemes, every=4)
    }


def _undisturbed() -> dict[str, str]:
    from tests.simulation.configurations import SHAPES

    return shared_out(_shapes, tuple(shape.name for shape in SHAPES))


def _shapes(job: int, names: Sequence[str]) -> dict[str, str]:
    from tests.simulation.many import digests_without_faults, stay_on_core

    stay_on_core(job)
    return digests_without_faults(counted("undisturbed", job, names, every=10))
