"""Runs that come from FSDP2 and leave for it, compared with training that stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.exchange.readers import open_checkpoint
from tests.models.exchange.fsdp2 import (
    BETAS,
    DECAY,
    EPS,
    LENGTH,
    LLAMA,
    RANKS,
    RATE,
    ROWS,
    batches,
    run,
    tokens,
)

pytestmark = pytest.mark.slow
STEPS = 20
"""Steps before and after the move."""


def configured(runner: Any, name: str, dtype: str) -> Path:
    """Writes a configuration with the data and the settings of FSDP2's side."""
    path = runner.root / "tokens.bin"
    path.write_bytes(tokens(2 * STEPS).numpy().astype(np.uint16).tobytes())
    changes = {
        "model": {"dtype": dtype, "hf": LLAMA},
        "data": {
            **{"path": None, "tokenizer": None, "tokens": str(path)},
            **{"sequence_length": LENGTH, "shuffle": False},
        },
        "train": {
            **{"steps": 2 * STEPS, "save_every": STEPS, "global_batch": ROWS},
            **{"micro_batch": ROWS, "clip_grad_norm": None},
        },
        "optimizer": {
            **{"lr": RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
            **{"schedule": "constant", "min_lr": 0.0, "warmup_steps": 0},
        },
        "cluster": {"workers": 1},
    }
    path = runner.configure(name, changes)
    return path


def losses_of(run_dir: Path) -> list[float]:
    """Returns the losses of a run's steps."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def job(root: Path, steps: range, **options: Any) -> dict[str, Any]:
    """Returns a job of FSDP2 over the fixed data."""
    torch.save(batches(2 * STEPS), root / "data.pt")
    return {"model": LLAMA, "data": str(root / "data.pt"), "steps": list(steps), **options}


@pytest.mark.parametrize(
    ("options", "dtype", "bound"),
    [
        ({}, "fp32", 1e-6),
        ({"computes": "bfloat16"}, "bf16", 5e-4),
        ({"dtype": "bfloat16"}, "bf16", 2e-3),
    ],
    ids=["fp32", "masters", "bf16"],
)
def test_a_run_goes_on_from_fsdp2_and_fsdp2_from_the_run(
    options: dict[str, str], dtype: str, bound: float, runner: Any
) -> None:
    """Trains 20 steps there, 20 here; then 20 here, 20 there. The losses are those of staying.

    FSDP2 with mixed precision keeps fp32 parameters and moments, as a run in bf16 does. With
    parameters in bf16 it rounds parameters and moments to bf16 in each step.
    """
    root, saved, start = runner.root, runner.root / "checkpoint", runner.root / "start"
    _, stayed = run(
        root,
        job(root, range(0), save=str(start), **options),
        job(root, range(2 * STEPS), save_after=STEPS, save=str(saved), **options),
    )
    assert stayed[0] - stayed[-1] > 0.05, "the model learns"
    check_shards(saved, root / "checkpoint-trainer")
    check_shards(saved, root / "checkpoint-automodel")
    moved = losses_of(imported(runner, "moved", saved, dtype))
    check(moved, stayed[STEPS:], bound)
    left = imported(runner, "left", start, dtype, "--weights-only")
    here = losses_of(left)
    if dtype == "fp32":
        check(here, stayed, bound)
    out = root / "out"
    words = ("--format", "dcp", "--step", str(STEPS), "--verify", "--dtype")
    code, output = runner.call(
        "export", left, out, *words, "bf16" if "dtype" in options else "fp32"
    )
    assert code == 0 and "verified" in output, output
    (continued,) = run(root, job(root, range(STEPS, 2 * STEPS), load=str(out), **options))
    check(continued, here[STEPS:], bound)


def check(losses: list[float], expected: list[float], bound: float) -> None:
    """Compares losses, and prints the largest relative difference."""
    print(max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)))
    assert losses == pytest.approx(expected, rel=bound, abs=0)


def check_shards(saved: Path, folder: Path) -> None:
    """Compares a folder of another trainer's form with the DCP folder, bit by bit."""
    first, second = open_checkpoint(saved), open_checkpoint(folder)
    assert folder.name.endswith(second.kind)
    assert (second.steps, second.groups) == (first.steps, first.groups)
    values = {(tensor.name, tensor.role): tensor.load() for tensor in first.tensors}
    assert len(values) == len(second.tensors)
    for tensor in second.tensors:
        assert torch.equal(tensor.load(), values[tensor.name, tensor.role]), tensor.name
        assert len(tensor.file.split(", ")) == RANKS


def imported(runner: Any, name: str, source: Path, dtype: str, *options: str) -> Path:
    """Imports a checkpoint and trains on to the last step; returns the run's directory."""
    config, run_dir = configured(runner, name, dtype), runner.root / name
    words = ("--config", config, "--run-dir", run_dir, "--verify", *options)
    code, output = runner.call("import", source, *words)
    assert code == 0, output
    runner.train(config)
    return run_dir
