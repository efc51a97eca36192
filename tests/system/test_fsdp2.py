"""Runs that come from FSDP2 and leave for it, compared with training that stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.exchange.fsdp2 import (
    BETAS,
    DECAY,
    EPS,
    LENGTH,
    LLAMA,
    RATE,
    ROWS,
    batches,
    run,
    tokens,
)

pytestmark = pytest.mark.slow
STEPS, TOLERANCE = 20, 1e-6
"""Steps before and after the move, and the bound of losses."""


def configured(runner: Any, name: str, steps: int) -> Path:
    """Writes a configuration with the data and the settings of FSDP2's side."""
    path = runner.root / "tokens.bin"
    path.write_bytes(tokens(2 * STEPS).numpy().astype(np.uint16).tobytes())
    changes = {
        "model": {"dtype": "fp32", "hf": LLAMA},
        "data": {
            **{"path": None, "tokenizer": None, "tokens": str(path)},
            **{"sequence_length": LENGTH, "shuffle": False},
        },
        "train": {
            **{"steps": steps, "save_every": STEPS, "global_batch": ROWS},
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


def test_a_run_goes_on_from_fsdp2_and_fsdp2_from_the_run(runner: Any) -> None:
    """Trains 20 steps there, 20 here; then 20 here, 20 there. The losses are those of 40 there."""
    root, saved, start = runner.root, runner.root / "checkpoint", runner.root / "start"
    _, stayed = run(
        root,
        job(root, range(0), save=str(start)),
        job(root, range(2 * STEPS), save_after=STEPS, save=str(saved)),
    )
    assert stayed[0] - stayed[-1] > 0.05, "the model learns"
    moved = imported(runner, "moved", saved, 2 * STEPS)
    print([abs(a / b - 1) for a, b in zip(losses_of(moved), stayed[STEPS:], strict=True)])
    assert losses_of(moved) == pytest.approx(stayed[STEPS:], rel=TOLERANCE, abs=0)
    left = imported(runner, "left", start, STEPS, "--weights-only")
    assert losses_of(left) == pytest.approx(stayed[:STEPS], rel=TOLERANCE, abs=0)
    out = root / "out"
    code, output = runner.call("export", left, out, "--format", "dcp", "--verify")
    assert code == 0 and "verified" in output, output
    (continued,) = run(root, job(root, range(STEPS, 2 * STEPS), load=str(out)))
    print([abs(a / b - 1) for a, b in zip(continued, stayed[STEPS:], strict=True)])
    assert continued == pytest.approx(stayed[STEPS:], rel=TOLERANCE, abs=0)


def imported(runner: Any, name: str, source: Path, steps: int, *options: str) -> Path:
    """Imports a checkpoint and trains on to step ``steps``; returns the run's directory."""
    config, run_dir = configured(runner, name, steps), runner.root / name
    words = ("--config", config, "--run-dir", run_dir, "--verify", *options)
    code, output = runner.call("import", source, *words)
    assert code == 0, output
    runner.train(config)
    return run_dir
