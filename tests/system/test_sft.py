"""Runs on conversations and completions have the losses of TRL's ``SFTTrainer``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from tests.data.sft import make as trl
from tests.system import conftest as H

LOSSES: dict[str, list[float]] = json.loads(
    (Path(trl.__file__).parent / "losses.json").read_text()
)["losses"]
IN_GATE = ("qwen2_5/messages/best-fit", "phi3/completion/none", "qwen3/completion/best-fit")
TOLERANCE = 1e-6
"""Two plain loops differ by 1.8e-7."""


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Keys of a run that repeats one of TRL's."""
    logging.disable_progress_bar()  # its monitor is a thread that stays
    template, kind, packing = name.split("/")
    trl.save(folder / "model", template)
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in trl.records(kind)))
    return {
        "model": {"hf": None, "path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "path": str(path),
            "tokenizer": None,
            "sequence_length": trl.LENGTH,
            "packing": packing,
            "shuffle": False,
        },
        "train": {
            "steps": trl.STEPS,
            "global_batch": trl.BATCH,
            "micro_batch": 2,
            "clip_grad_norm": 1.0,
        },
        "optimizer": {
            "lr": trl.RATE,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": trl.DECAY,
            "schedule": "linear",
            "curve": "transformers",
            "warmup_steps": trl.WARMUP,
            "min_lr": 0.0,
        },
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in IN_GATE else pytest.mark.slow) for n in LOSSES],
)
def test_losses_equal_those_of_trl(runner: H.Runner, name: str) -> None:
    run_dir = runner.train(runner.configure("run", settings(name, runner.root)))
    losses = [line["loss"] for line in H.metrics(run_dir)]
    assert len(losses) == len(LOSSES[name])
    worst = max(abs(a / b - 1) for a, b in zip(losses, LOSSES[name], strict=True))
    print(f"{name}: largest relative difference {worst:.2g}")
    assert worst <= TOLERANCE, list(zip(losses, LOSSES[name], strict=True))
