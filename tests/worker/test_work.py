"""FLOPs of programs: the model's, whichever way a plan cuts it, and what it makes again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.planner.cost.catalogue import peak_flops_of
from penstock.planner.planning.configured import build_plan
from penstock.shm.table import BlockTable
from penstock.workers.state.routing import TensorRouting
from penstock.workers.telemetry.work import Flops, flops_of
from tests.planner.conftest import make_config, make_table

BLOCKS, MICRO_BATCHES = 8, 8
ONCE = 2.0 * BLOCKS * MICRO_BATCHES
SCHEDULES: dict[str, tuple[dict[str, Any], float]] = {
    "all kept": ({"scheme": "1f1b"}, 0.0),
    "made again": ({"scheme": "1f1b", "recompute": "full"}, 0.75),
    "split backward": ({"scheme": "zb-h1"}, 0.0),
    "interleaved": ({"scheme": "interleaved"}, 0.0),
}


def table() -> BlockTable:
    made = make_table(BLOCKS)
    return replace(made, blocks=tuple(replace(b, forward_flops=2.0) for b in made.blocks))


@pytest.mark.parametrize("case", SCHEDULES)
def test_the_models_flops_do_not_depend_on_the_plan(case: str) -> None:
    schedule, again = SCHEDULES[case]
    config = make_config(workers=4, micro_batches=MICRO_BATCHES, **schedule)
    plan = build_plan(config, table())
    total = Flops()
    for program in plan.programs:
        total += flops_of(program, TensorRouting.of(plan).layout, table())
    assert total.model == 3 * ONCE
    assert total.recomputed == pytest.approx(again * ONCE)


def test_a_forward_that_stops_early_is_counted_where_it_is_made_up_for() -> None:
    plan = build_plan(make_config("mobius", workers=2, micro_batches=MICRO_BATCHES), table())
    total = sum(
        (flops_of(p, TensorRouting.of(plan).layout, table()) for p in plan.programs), Flops()
    )
    assert total.model == 3 * ONCE and 0 < total.recomputed < ONCE


def test_peaks_by_the_names_of_drivers() -> None:
    found = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "Tesla V100-SXM2-32GB": 125e12,
        "Tesla V100-PCIE-32GB": 112e12,
        "NVIDIA GeForce RTX 4090": 165e12,
        "Quadro P400": None,
    }
    assert {name: peak_flops_of(name) for name in found} == found
