"""Twenty fp32 steps through real daemons match a plain loop, for every scheme and cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.daemons.memory.snapshot import read_block
from penstock.protocol.plan.groups import step_ranges
from penstock.protocol.run.rundir import RunDirectory
from tests.folders import start_from_folder
from tests.system import conftest as H
from tests.system.reference import ReferenceLoop, reference_loop

STEPS = 20


def case(scheme: str, nodes: int, workers: int, clip: bool, tied: bool) -> dict[str, Any]:
    """Configuration changes of one cell of the matrix; ``gpipe x2`` are two replicas of gpipe."""
    name, _, replicas = scheme.partition(" x")
    schedule: dict[str, Any] = {"scheme": name, "replicas": int(replicas or 1)}
    return {
        "model": {"hf": {"tie_word_embeddings": tied}},
        "train": {"clip_grad_norm": 1.6 if clip else None, "steps": STEPS},
        "schedule": schedule,
        "cluster": {"workers": workers, "nodes": [{"name": n} for n in "ab"[:nodes]]},
    }


GATE = [("chimera", 2, 1, True, True)]
"""Few: that schedules compute the same is shown in tests/worker/test_parity_matrix.py. On one node,
1F1B without clipping and SPipe with it have tests of their own.
"""
OTHER_SCHEMES = [
    ("chimera", 2, 2, True, False),
    ("chimera", 1, 2, False, True),
    ("zero3-offload", 2, 1, True, True),
    ("hanayo", 2, 1, True, True),
    ("interleaved", 1, 2, False, False),
    ("naive", 1, 2, True, True),
    ("megatron-offload", 2, 1, True, True),
    ("gpipe x2", 2, 1, True, True),
    ("1f1b x2", 1, 4, True, False),
    ("spipe x2", 2, 2, False, True),
    ("chimera x2", 2, 2, True, True),
    ("1f1b x2", 2, 2, True, True),
    ("zero3-offload", 1, 4, False, True),
    ("bpipe", 1, 4, True, False),
]
FULL = [
    cell
    for cell in itertools.product(
        ("gpipe", "1f1b", "mobius", "spipe"), (1, 2), (1, 2, 4), (True, False), (True, False)
    )
    if cell not in GATE and cell[1] * cell[2] <= 4
] + OTHER_SCHEMES


def final_weights(run_dir: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Master weights of the newest saved state by Hugging Face name."""
    table = RunDirectory(run_dir).table
    state = max((run_dir / "state").glob("step-*"))
    found: dict[str, np.ndarray[Any, Any]] = {}
    for block in table.blocks:
        arrays = read_block(state, block)
        found |= {t.name: arrays[t.name] for t in block.tensors if t.trainable}
    return found


def check_parity(runner: Any, cell: tuple[str, int, int, bool, bool]) -> None:
    """Run one cell and its reference."""
    config = start_from_folder(runner.configure("parity", case(*cell)))
    check_parity_of(runner.train(config), clip=cell[3])


def check_parity_of(
    run_dir: Path, *, clip: bool, make: Callable[[Path], ReferenceLoop] = ReferenceLoop
) -> None:
    """Compare losses, norms and weights of a finished run with the reference's."""
    lines = H.metrics(run_dir)
    steps = RunDirectory(run_dir).config.train.steps
    expected = reference_loop(run_dir, steps, make)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    np.testing.assert_allclose([m["loss"] for m in lines], expected.losses, rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in lines], expected.grad_norms, rtol=1e-5)
    if clip:
        assert {"commit", "amend"} == {m["decision"] for m in lines}, "clip some steps, not all"
    weights = final_weights(run_dir)
    compare_weights(weights, expected.weights, 0.01 * expected.summed_lr)


def compare_weights(
    ours: dict[str, np.ndarray[Any, Any]],
    theirs: dict[str, np.ndarray[Any, Any]],
    element_limit: float,
    norm_limit: float = 1e-5,
) -> None:
    """Norm of the difference over the whole model to 1e-5, each element within the limit."""
    difference, norm = 0.0, 0.0
    for name, value in ours.items():
        delta = value.astype(np.float64) - theirs[name]
        difference += float((delta**2).sum())
        norm += float((theirs[name].astype(np.float64) ** 2).sum())
        assert np.abs(delta).max() <= element_limit, name
    assert (difference / norm) ** 0.5 <= norm_limit
    tied = set(theirs) - set(ours)
    assert tied <= {"lm_head.weight"}


def test_parity_of_a_plain_run(runner: Any) -> None:
    config = start_from_folder(runner.configure("plain", H.PLAIN))
    check_parity_of(runner.train(config), clip=False)


def test_parity_of_a_clipped_run(runner: Any) -> None:
    config = start_from_folder(runner.configure("clipped", H.CLIPPED))
    check_parity_of(runner.train(config), clip=True)


GROUPS = [
    {"match": ["embed_tokens", "lm_head"], "rate": 0.1, "weight_decay": 0.0},
    {"match": "norm", "rate": 3.0, "weight_decay": 0.5},
    {"match": r"layers\.[0-2]\.", "rate": 0.5},
]


def test_parity_of_a_run_with_groups(runner: Any) -> None:
    """Another rate and decay of embeddings and norms, in the middle of blocks another rate."""
    changes = H.merge(H.PLAIN, {"optimizer": {"groups": GROUPS}, "train": {"clip_grad_norm": 1.6}})
    run_dir = runner.train(start_from_folder(runner.configure("groups", changes)))
    check_parity_of(run_dir, clip=True)
    expected = reference_loop(run_dir, 40)
    losses = [line["loss"] for line in H.metrics(run_dir)]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-6)
    run = RunDirectory(run_dir)
    assert len(step_ranges(run.config.optimizer, run.table, 1)) > 1


@pytest.mark.parametrize("cell", GATE, ids=str)
def test_parity(runner: Any, cell: tuple[str, int, int, bool, bool]) -> None:
    check_parity(runner, cell)


@pytest.mark.slow
def test_bf16_parity(runner: Any) -> None:
    """bf16 weights and gradients beside a loop that rounds in the same places.

    Stated tolerance: a sum that falls on the other side of a rounding boundary changes a gradient
    or a weight by one unit in its eighth bit, so losses agree to 1e-4 and norms to 2e-3 relative,
    and the fp32 masters to 1e-3 in relative norm.
    """
    changes = case("spipe", 1, 2, True, True)
    changes["model"]["dtype"] = "bf16"
    changes["optimizer"] = {"grad_dtype": "bf16"}
    run_dir = runner.train(start_from_folder(runner.configure("bf16", changes)))
    lines = H.metrics(run_dir)
    expected = reference_loop(run_dir, STEPS)
    np.testing.assert_allclose([m["loss"] for m in lines], expected.losses, rtol=1e-4)
    np.testing.assert_allclose([m["grad_norm"] for m in lines], expected.grad_norms, rtol=2e-3)
    compare_weights(final_weights(run_dir), expected.weights, 0.05 * expected.summed_lr, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("cell", FULL, ids=str)
def test_parity_full_matrix(runner: Any, cell: tuple[str, int, int, bool, bool]) -> None:
    check_parity(runner, cell)
