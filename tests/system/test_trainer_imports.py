"""Runs that go on from a checkpoint of transformers' Trainer, compared with the Trainer itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.exchange.trainers import BATCH, LENGTH, LLAMA, SETTINGS, new_model, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
STEPS = 20
"""Steps there, and steps here."""


def configured(runner: Any, name: str, dtype: str) -> Path:
    """Writes a configuration with the Trainer's data, settings and curve."""
    path = runner.root / "tokens.bin"
    path.write_bytes(tokens(2 * STEPS).numpy().astype(np.uint16).tobytes())
    return runner.configure(
        name,
        {
            "model": {"dtype": dtype, "hf": {**LLAMA, "model_type": "llama"}},
            "data": {
                "path": None,
                "tokenizer": None,
                "tokens": str(path),
                "sequence_length": LENGTH,
                "shuffle": False,
            },
            "train": {
                "steps": 2 * STEPS,
                "global_batch": BATCH,
                "micro_batch": BATCH,
                "clip_grad_norm": SETTINGS["max_grad_norm"],
            },
            "optimizer": {
                "lr": SETTINGS["learning_rate"],
                "betas": [0.9, SETTINGS["adam_beta2"]],
                "weight_decay": SETTINGS["weight_decay"],
                "schedule": "linear",
                "curve": "transformers",
                "warmup_steps": SETTINGS["warmup_steps"],
                "min_lr": 0.0,
            },
            "cluster": {"workers": 1},
        },
    )


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("fp32", 1e-6), pytest.param("bf16", 2e-2, marks=pytest.mark.slow)],
)
def test_the_next_losses_are_those_of_a_trainer_that_stays(
    dtype: str, bound: float, runner: Any
) -> None:
    """The next 20 losses agree to 1e-6 in fp32, and to 2e-2 in bf16. There the Trainer rounds its
    weights and moments to bf16 in each step, and a run keeps them in fp32.
    """
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    model = new_model().to(kind)
    trained = train(runner.root / "trainer", 2 * STEPS, saved_at=STEPS, model=model)
    config, run_dir = configured(runner, "moved", dtype), runner.root / "moved"
    words = ("--config", config, "--run-dir", run_dir, "--verify")
    code, output = runner.call("import", trained.path, *words)
    assert code == 0, output
    report = json.loads((run_dir / "import.json").read_text())
    assert (report["step"], report["samples_seen"]) == (STEPS, STEPS * BATCH)
    assert report["unused"] == []
    runner.train(config)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == pytest.approx(trained.losses[STEPS:], rel=bound, abs=0)
    assert trained.losses[0] - trained.losses[-1] > 0.1, "the model learns"
