"""Data-parallel replicas: the same schedule on other devices, with other micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.planner.planning.configured import build_plan
from penstock.planner.schedule.layout import Residency, StageLayout
from penstock.planner.schedule.replicas import replicate
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import format_instruction, parse_instruction
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.shm.table import BlockTable

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]


def schedule_of_texts(*devices: str, backward: tuple[StageRange, ...] | None = None) -> Schedule:
    """Two blocks, one stage each, two micro-batches."""
    stages = (StageRange(start=0, stop=1, device=0), StageRange(start=1, stop=2, device=1))
    return Schedule(
        scheme="by hand",
        layout=StageLayout(
            num_devices=2, num_microbatches=2, forward=stages, backward=backward or stages
        ),
        orders=tuple(
            tuple(parse_instruction(text) for text in device.split("; "))  # type: ignore[misc]
            for device in devices
        ),
        residency=Residency.RESIDENT,
    )


def test_every_field_moves() -> None:
    """The second replica has devices 2 and 3, stages 2 and 3, micro-batches 2 and 3."""
    once = schedule_of_texts(
        "F 0 0 keep=all; SO 0 0 fraction=0.5 peer=1; SI 0 0 fraction=0.5 peer=1; BI 0 0; BW 0 0,1",
        "F 1 0 keep=input; SO 1 1 fraction=1.0; R 1 0; B 1 0; U 1",
    )
    twice = replicate(once, 2)
    assert [[format_instruction(i) for i in order] for order in twice.orders] == [
        *([format_instruction(i) for i in order] for order in once.orders),
        [
            "F 2 2 keep=all",
            "SO 2 2 fraction=0.5 peer=3",
            "SI 2 2 fraction=0.5 peer=3",
            "BI 2 2",
            "BW 2 2,3",
        ],
        # Block 1 is updated once, where its owner is.
        ["F 3 2 keep=input", "SO 3 3 fraction=1.0", "R 3 2", "B 3 2"],
    ]
    assert twice.layout == StageLayout(
        num_devices=4,
        num_microbatches=4,
        forward=tuple(StageRange(start=d % 2, stop=d % 2 + 1, device=d) for d in range(4)),
        backward=tuple(StageRange(start=d % 2, stop=d % 2 + 1, device=d) for d in range(4)),
        routes=(0, 0, 1, 1),
    )


def test_one_replica_is_the_schedule_itself() -> None:
    once = schedule_of_texts("F 0 0 keep=all", "F 1 0 keep=all")
    assert replicate(once, 1) is once


def test_a_graph_that_stays_needs_one_number_in_both_lists() -> None:
    finer = (StageRange(start=0, stop=1, device=0), StageRange(start=1, stop=2, device=1))
    uneven = schedule_of_texts("F 0 0 keep=all", "F 1 0 keep=all")
    layout = replace(uneven.layout, backward=(*finer[:1], *finer))
    with pytest.raises(
        ConfigError, match=r"schedule\.replicas = 2: by hand keeps activations with"
    ):
        replicate(replace(uneven, layout=layout), 2)


@pytest.mark.parametrize(
    ("scheme", "schedule"),
    [
        ("1f1b", {}),
        ("1f1b", {"recompute": "full", "passes": ["mario"]}),
        ("spipe", {"passes": ["skip-dead-forward"]}),
        ("interleaved", {"stages_per_device": 2}),
        ("chimera", {}),
        ("megatron-offload", {}),
    ],
)
def test_plans_of_replicas_compute_what_one_does(
    scheme: str,
    schedule: dict[str, Any],
    make_table: Tables,
    make_config: Configs,
    execute: Callable[[Plan], None],
) -> None:
    config = make_config(scheme, workers=4, micro_batches=8, replicas=2, **schedule)
    table = make_table(8)
    plan = build_plan(config, table)
    assert plan.num_routes == (4 if scheme == "chimera" else 2)
    validate(plan, table)
    execute(plan)
    alone = build_plan(make_config(scheme, workers=2, micro_batches=4, **schedule), table)
    assert plan.programs[:2] == alone.programs
    assert plan.evaluation[:2] == alone.evaluation


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"workers": 4, "replicas": 3},
            r"schedule\.replicas = 3: 4 workers .* cannot be shared out evenly",
        ),
        (
            {"workers": 3, "replicas": 3, "micro_batches": 4},
            r"schedule\.replicas = 3: 4 micro-batches \(train\.global_batch",
        ),
        ({"workers": 4, "replicas": 2, "forward_stages": 3}, r"gpipe with 2 workers accepts 2"),
    ],
)
def test_impossible_numbers_of_replicas(
    config: dict[str, Any], message: str, make_table: Tables, make_config: Configs
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(make_config("gpipe", **config), make_table(8))
