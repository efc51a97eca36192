"""Whole programs of small cases (golden/*.txt), and what the papers' figures fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import Config
from penstock.planner.planning.configured import build_plan
from penstock.planner.validate.check import program_grid
from penstock.protocol.plan.instructions import (
    Backward,
    Forward,
    Program,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
)
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import BlockTable

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("name", "num_blocks", "config"),
    [
        ("gpipe", 4, {"scheme": "gpipe", "workers": 2, "micro_batches": 2}),
        ("1f1b", 4, {"scheme": "1f1b", "workers": 2, "micro_batches": 3}),
        (
            "1f1b-recompute",
            4,
            {"scheme": "1f1b", "workers": 2, "micro_batches": 2, "recompute": "full"},
        ),
        (
            "mobius",
            4,
            {"scheme": "mobius", "workers": 2, "micro_batches": 2, "forward_stages": 4},
        ),
        (
            "spipe",
            8,
            {
                "scheme": "spipe",
                "workers": 2,
                "micro_batches": 2,
                "forward_stages": 2,
                "backward_stages": 4,
            },
        ),
        (
            "spipe-one-device",
            8,
            {
                "scheme": "spipe",
                "workers": 1,
                "micro_batches": 2,
                "forward_stages": 2,
                "backward_stages": 4,
            },
        ),
    ],
)
def test_golden_programs(
    name: str, num_blocks: int, config: dict[str, Any], make_table: Tables, make_config: Configs
) -> None:
    plan = build_plan(make_config(**config), make_table(num_blocks))
    text = f"{program_grid(plan.programs)}\nevaluation\n{program_grid(plan.evaluation)}"
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def _stage_order(program: Program, kind: type[Forward] | type[Backward]) -> list[int]:
    """Stages in the order in which they take their first micro-batch."""
    return list(dict.fromkeys(i.stage for i in program if isinstance(i, kind)))


def test_spipe_assigns_passes_as_figure_8(make_table: Tables, make_config: Configs) -> None:
    """4 devices, 8 forward stages, 16 backward stages: b_{7,1} on device 0, b_{7,0} on device 1, …

    The figure calls backward stage ``2 i + k`` b_{i,k}: device 0 has S_{7,1}, S_{5,1}, S_{3,1},
    S_{1,1}.
    """
    plan = build_plan(_figure_8(make_config), make_table(16))
    orders = [
        (_stage_order(program, Forward), _stage_order(program, Backward))
        for program in plan.programs
    ]
    assert orders == [
        ([0, 4], [15, 11, 7, 3]),
        ([1, 5], [14, 10, 6, 2]),
        ([2, 6], [13, 9, 5, 1]),
        ([3, 7], [12, 8, 4, 0]),
    ]


def _figure_8(make_config: Configs) -> Config:
    return make_config("spipe", workers=4, micro_batches=4, forward_stages=8, backward_stages=16)


def test_spipe_starts_backward_where_forward_ends_first(
    make_table: Tables, make_config: Configs
) -> None:
    """Three forward stages on two devices: device 1 is free first, so it has the last stage."""
    config = make_config("spipe", workers=2, forward_stages=3, backward_stages=6)
    plan = build_plan(config, make_table(6))
    assert [stage.device for stage in plan.forward_stages] == [0, 1, 0]
    assert [stage.device for stage in plan.backward_stages] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("micro_batches", "kept"), [(1, [1, 1, 1, 1]), (2, [2, 2, 2, 1]), (8, [4, 3, 2, 1])]
)
def test_1f1b_bounds_activations(
    micro_batches: int, kept: list[int], make_table: Tables, make_config: Configs
) -> None:
    """Device d of p keeps at most min(p - d, m) micro-batches."""
    config = make_config("1f1b", workers=4, micro_batches=micro_batches)
    plan = build_plan(config, make_table(4))
    assert [_most_kept(program) for program in plan.programs] == kept


def _most_kept(program: Program) -> int:
    kept = most = 0
    for instruction in program:
        kept += isinstance(instruction, Forward) - isinstance(instruction, Backward)
        most = max(most, kept)
    return most


@pytest.mark.parametrize("scheme", ["gpipe", "1f1b", "mobius", "spipe"])
def test_at_most_two_activations_and_gradients_are_posted(
    scheme: str, make_table: Tables, make_config: Configs
) -> None:
    """One for the next consumer, one ahead: receive buffers are bounded."""
    plan = build_plan(make_config(scheme, workers=4, micro_batches=16), make_table(24))
    for program in plan.programs:
        assert _most_posted(plan, program) <= 2


def _most_posted(plan: Plan, program: Program) -> int:
    posted: set[tuple[str, int, int]] = set()
    most = 0
    for i in program:
        match i:
            case RecvActivation():
                posted.add(("activation", i.stage, i.micro_batch))
            case RecvGradient():
                posted.add(("gradient", i.stage, i.micro_batch))
            case Forward():
                posted.discard(("activation", i.stage - 1, i.micro_batch))
            case Backward():
                posted.discard(("gradient", i.stage + 1, i.micro_batch))
        most = max(most, len(posted))
    return most


def test_spipe_posts_checkpoints_long_before_their_use(
    make_table: Tables, make_config: Configs
) -> None:
    """Checkpoints move while devices still compute other things, not right before RECOMPUTE."""
    plan = build_plan(_figure_8(make_config), make_table(16))
    early = total = 0
    for program in plan.programs:
        compute_before = 0
        posted: dict[tuple[int, int], int] = {}
        for i in program:
            if isinstance(i, RecvCheckpoint):
                posted[i.stage, i.micro_batch] = compute_before
            elif isinstance(i, Forward | Backward):
                compute_before += 1
                ahead = compute_before - posted.get((i.stage, i.micro_batch), compute_before)
                if isinstance(i, Backward) and (i.stage, i.micro_batch) in posted:
                    total += 1
                    early += ahead > 2
    assert total == 44
    # The rest is needed as soon as it exists: backward follows forward without a pause.
    assert early >= 36
