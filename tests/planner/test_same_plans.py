"""Plans, simulations and memory of every scheme and pass, as hashes: golden/plans.json.

What moves code and means to change nothing leaves the file as it is. A change that is meant
rewrites it, and its difference shows how far the change reaches::

    python -m tests.planner.test_same_plans

The file says, by scheme, by passes and by case (sizes and costs), ``plan simulation memory``: 12
hexadecimal digits each of the SHA-256 of the plan file; of what ``penstock plan --json`` says of
its simulation, and of all its spans; and of what each device holds at each instruction. ``same``
stands for a schedule that the passes leave as it was, ``refused`` for one that they, or the scheme,
do not take, ``stuck`` for a plan that cannot be simulated because its instructions wait for each
other. Of configurations there is a hash of the memory table as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.sources import AnalyticSource, CostSource, UnitCosts
from penstock.planner.memory.footprint import Footprint, footprints
from penstock.planner.memory.table import memory_table
from penstock.planner.passes import PASSES
from penstock.planner.planning.auto import choose
from penstock.planner.planning.build import ScheduleRequest, with_stages
from penstock.planner.planning.configured import build_plan
from penstock.planner.planning.pipeline import (
    OPTIMIZER_WAYS,
    PlanContext,
    apply_passes,
    make_schedule,
    price,
    try_plan,
    try_schedule,
    validated,
)
from penstock.planner.planning.pricing import config_context
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes import SCHEMES
from penstock.planner.simulate import Simulation
from penstock.shm.table import BlockTable
from tests.planner.conftest import AnyMachine, make_config, make_table

GOLDEN = Path(__file__).parent / "golden" / "plans.json"
EXAMPLES = Path(__file__).parents[2] / "examples"

Hashes = dict[str, dict[str, str]]
"""By passes, then by case."""

_MODEL = AnalyticSource(gpu="V100-PCIE-32", model="gpt3-1.3b", layers=14, sequence_length=1024)
COSTS: Mapping[str, tuple[CostSource, str, bool]] = MappingProxyType(
    {
        "units": (UnitCosts(backward_input=1.5, optimizer=0.25), "advance", False),
        "streamed model": (_MODEL, "preview-settle", True),
        "model on devices": (replace(_MODEL, offloaded=False), "synchronous", False),
    }
)
"""Source, optimizer, and whether workers stop early."""

SIZES = (
    {"num_devices": 1, "num_microbatches": 2},
    {"num_devices": 2, "num_microbatches": 3},
    {"num_devices": 2, "num_microbatches": 4, "recompute": "full"},
    {"num_devices": 3, "num_microbatches": 6, "recompute": "none"},
    {
        "num_devices": 4,
        "num_microbatches": 8,
        "recompute": "selective",
        "drop": ("norm", "attention_core"),
    },
    {"num_devices": 4, "num_microbatches": 4, "stages_per_device": 2},
    {"num_devices": 2, "num_microbatches": 4, "forward_stages": 4, "backward_stages": 8},
)
"""Of schedules without passes; what a scheme does not accept is refused."""

PASS_CASES = (
    ({"num_devices": 4, "num_microbatches": 6}, "units", False),
    ({"num_devices": 4, "num_microbatches": 4, "recompute": "none"}, "units", True),
    ({"num_devices": 2, "num_microbatches": 4}, "streamed model", True),
    ({"num_devices": 2, "num_microbatches": 4, "recompute": "full"}, "model on devices", False),
    ({"num_devices": 4, "num_microbatches": 4, "recompute": "none"}, "model on devices", True),
)
"""Of schedules with passes: size, costs, and whether memory is limited."""

SEARCH_CASE = ({"num_devices": 2, "num_microbatches": 2}, "units", False)
"""Of schedules that a pass searches through: it takes long where there are many."""

COMBINATIONS = (
    ("apply-checkpoint", "overlap-recompute", "remove-redundancy", "prepose-forward"),
    ("split-backward", "fill-bubbles", "concatenate", "flush-half"),
    ("mario", "2bp"),
    ("identify", "migrate-forwards"),
    ("identify-cmb", "migrate-forwards", "relax-dependencies", "refine-migration"),
    ("identify-cmb", "migrate-forwards", "swap-aware-recompute", "adjust-partition"),
    ("decouple-backward", "refine-backward", "overlap-recompute"),
    ("match-stages", "device-update", "skip-dead-forward"),
    ("keep-what-fits", "2bp"),
)
"""Beside each pass alone."""

SEARCHING = ("reorder",)
"""Passes that search."""

LIMIT = 0.8
"""Device memory for passes, as a share of what the schedule needs without them."""


def _emulated(**sections: Any) -> tuple[Config, BlockTable]:
    """The example of an emulated cluster, with other sections."""
    raw = yaml.safe_load((EXAMPLES / "emulated.yaml").read_text(encoding="utf-8"))
    config = parse_config({**raw, **sections})
    return config, Emulation.of(config).table


def _tiny() -> tuple[Config, BlockTable]:
    """The small example, on a table that needs no model."""
    raw = yaml.safe_load((EXAMPLES / "tiny.yaml").read_text(encoding="utf-8"))
    return parse_config(raw), make_table(10)


def _chosen() -> tuple[Config, BlockTable]:
    """What ``schedule: auto`` makes of a small model."""
    table = make_table(8)
    return choose(make_config("auto", recompute="full"), table, AnyMachine()).config, table


@cache
def configurations() -> dict[str, tuple[Config, BlockTable]]:
    """Whole configurations and their tables, by what they are about."""
    table = make_table(12)
    residents = {"passes": ["interleave-updates"], "resident_share": 0.25}
    twinflow = {"passes": ["twinflow"], "resident_share": 0.5}
    replicas = {"replicas": 2, "reduce_gradients": True}
    spipe = {"scheme": "spipe", "forward_stages": 8, "backward_stages": 24}
    early = {"grad_dtype": "bf16", "settle": "early"}
    return {
        "tiny example": _tiny(),
        "emulated example": _emulated(),
        "emulated, settled early": _emulated(optimizer=early),
        "spipe with residents": _emulated(schedule={**spipe, **residents}),
        "spipe with twinflow": _emulated(schedule={**spipe, **twinflow}),
        "replicas": (make_config("1f1b", workers=2, nodes=2, micro_batches=8, **replicas), table),
        "chimera": (make_config("chimera", workers=2, nodes=2, micro_batches=8), table),
        "auto": _chosen(),
    }


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _simulated(simulation: Simulation) -> str:
    """Text of all that a simulation says; ``repr`` keeps every bit of a float."""
    spans = [(str(s.lane), s.place, s.label, s.start_s, s.end_s, s.peer) for s in simulation.spans]
    return f"{simulation.makespan_s!r} {json.dumps(simulation.summary())} {spans!r}"


def _held(simulation: Simulation) -> str:
    """Text of what devices hold, by use and instruction."""
    held = footprints(simulation.plan, simulation.costs)
    return repr([[getattr(one, field.name) for field in fields(Footprint)] for one in held])


def _hashes(simulation: Simulation) -> str:
    """What the golden file says of a plan."""
    texts = (simulation.plan.to_json(), _simulated(simulation), _held(simulation))
    return " ".join(map(_short, texts))


def _label(size: Mapping[str, Any]) -> str:
    """A size in a few words."""
    return " ".join(f"{key.removeprefix('num_')}={value}" for key, value in size.items())


def _of_plain(
    scheme: str, size: Mapping[str, Any], costs: str
) -> tuple[Schedule, PlanContext] | None:
    """A scheme's schedule and what it is tried with; ``None`` if the scheme does not accept it."""
    source, optimizer, stops_early = COSTS[costs]
    try:
        request = with_stages(ScheduleRequest(scheme=scheme, **size))
        context = PlanContext(
            prices=price(source, request),
            optimizer=OPTIMIZER_WAYS[optimizer],
            stops_early=stops_early,
        )
        return make_schedule(request, context), context
    except ConfigError:
        return None


def _of_passes(scheme: str) -> Hashes:
    """Each pass alone and the combinations."""
    found: Hashes = {}
    alone = tuple((name,) for name in PASSES if name not in SEARCHING)
    cases = [(alone + COMBINATIONS, case) for case in PASS_CASES]
    for several, (size, costs, is_limited) in (*cases, ((SEARCHING,), SEARCH_CASE)):
        plain = _of_plain(scheme, size, costs)
        if plain is None:
            continue
        before, context = plain
        limited = _limited(before, context) if is_limited else context
        case = f"{_label(size)}, {costs}{', limited memory' if is_limited else ''}"
        for passes in several:
            hashes = _after(before, passes, limited, context)
            found.setdefault(", ".join(passes), {})[case] = hashes
    return found


def _limited(before: Schedule, context: PlanContext) -> PlanContext:
    """With a limit that a schedule without passes is over."""
    peaks = try_schedule(before, (), context).peaks
    limit = LIMIT * max(peak.total_bytes for peak in peaks)
    return replace(context, memory_limit_bytes=limit)


def _after(
    before: Schedule, passes: tuple[str, ...], limited: PlanContext, context: PlanContext
) -> str:
    """A schedule after passes that keep to a limit, tried without one."""
    try:
        after = apply_passes(before, passes, limited)
        validated(after, passes)
    except ConfigError:
        return "refused"
    if after == before:
        return "same"
    try:
        return _hashes(try_schedule(after, (), context))
    except ConfigError:
        return "stuck"


def hashes_of_scheme(scheme: str) -> Hashes:
    """All that the golden file says of a scheme."""
    found: Hashes = {"no passes": {}}
    for costs in COSTS:
        for size in SIZES:
            plain = _of_plain(scheme, size, costs)
            found["no passes"][f"{_label(size)}, {costs}"] = (
                "refused" if plain is None else _hashes(try_schedule(plain[0], (), plain[1]))
            )
    return {**found, **_of_passes(scheme)}


def hashes_of_configuration(config: Config, table: BlockTable) -> str:
    """All that the golden file says of a configuration: as of schemes, and its memory table."""
    plan, context = build_plan(config, table), config_context(config, table)
    simulation = try_plan(plan, context)
    rows = [
        (row.place, str(row.resource), row.use, row.num_bytes)
        for row in memory_table(config, table, plan, context.prices.costs)
    ]
    return f"{_hashes(simulation)} {_short(repr(rows))}"


def _differences(scheme: str, found: Hashes, golden: Hashes) -> list[str]:
    """A line for each case that is not as it was; ``None`` where there was none, or is none."""
    cases = {(passes, case) for side in (found, golden) for passes in side for case in side[passes]}
    return [
        f"{scheme}, {passes}, {case}: {before} -> {after}"
        for passes, case in sorted(cases)
        if (before := golden.get(passes, {}).get(case))
        != (after := found.get(passes, {}).get(case))
    ]


def _golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plans_of_schemes_and_passes_are_the_same(scheme: str) -> None:
    golden = _golden()["schemes"].get(scheme, {})
    assert _differences(scheme, hashes_of_scheme(scheme), golden) == []


@pytest.mark.parametrize("name", configurations())
def test_plans_of_configurations_are_the_same(name: str) -> None:
    assert hashes_of_configuration(*configurations()[name]) == _golden()["configurations"].get(name)


def test_the_golden_file_has_nothing_else() -> None:
    golden = _golden()
    assert set(golden["schemes"]) == set(SCHEMES)
    assert set(golden["configurations"]) == set(configurations())


def main() -> None:
    """Rewrite the golden file."""
    content = {
        "schemes": {scheme: hashes_of_scheme(scheme) for scheme in SCHEMES},
        "configurations": {
            name: hashes_of_configuration(*pair) for name, pair in configurations().items()
        },
    }
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
