"""Runs on pairs of answers have the losses of TRL's ``DPOTrainer``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from tests.data.dpo import make as trl
from tests.data.sft import make as sft
from tests.system import conftest as H

STORED: dict[str, Any] = json.loads((Path(trl.__file__).parent / "losses.json").read_text())
IN_GATE = ("truncated", "text")
TOLERANCE = 1e-5


def settings(kind: str, folder: Path) -> dict[str, Any]:
    """Keys of a run that repeats one of TRL's: two rows for each of its pairs."""
    logging.disable_progress_bar()  # its monitor is a thread that stays
    sft.save(folder / "model", trl.TEMPLATE)
    files = {
        "records.jsonl": trl.pairs(kind, trl.records(kind)),
        "held-out.jsonl": trl.pairs(kind, trl.EVALUATED, seed=10),
    }
    for name, records in files.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / name).write_text(text)
    return {
        "model": {"hf": None, "path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "path": str(folder / "records.jsonl"),
            "tokenizer": None,
            "objective": "dpo",
            "dpo": {"beta": trl.BETA},
            "sequence_length": trl.LENGTHS[kind],
            "shuffle": False,
        },
        "train": {
            "steps": trl.STEPS,
            "global_batch": 2 * trl.PAIRS,
            "micro_batch": 4,
            "clip_grad_norm": 1.0,
        },
        "eval": {
            "sets": [{"name": "pairs", "path": str(folder / "held-out.jsonl"), "every": trl.STEPS}]
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
    "kind",
    [pytest.param(k, marks=() if k in IN_GATE else pytest.mark.slow) for k in trl.LENGTHS],
)
def test_losses_of_pairs_equal_those_of_trl(runner: H.Runner, kind: str) -> None:
    run_dir = runner.train(runner.configure("run", settings(kind, runner.root)))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["phase"] == "train"]
    expected = STORED[kind]["losses"]
    assert len(losses) == len(expected)
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    print(f"{kind}: largest difference {worst:.2g}")
    assert worst <= TOLERANCE, list(zip(losses, expected, strict=True))
    (evaluated,) = [line for line in lines if line["phase"] == "eval"]
    loss, accuracy = STORED[kind]["eval"]
    assert evaluated["loss"] == pytest.approx(loss, abs=TOLERANCE)
    if evaluated["pairs"] % trl.PAIRS == 0:  # TRL's accuracy is the mean of its batches' means
        assert evaluated["pair_accuracy"] == pytest.approx(accuracy)
    assert "perplexity" not in evaluated and "token_accuracy" not in evaluated
