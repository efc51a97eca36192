"""Runs that go on from a checkpoint of transformers' Trainer, compared with the Trainer itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

from penstock.models.exchange.readers import open_checkpoint
from tests.models.exchange.memory import LARGE, LIMIT, LIMITED
from tests.models.exchange.trainers import (
    BATCH,
    LENGTH,
    LLAMA,
    SETTINGS,
    new_model,
    saved_untrained,
    tokens,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
STEPS = 20
"""Steps there, and steps here."""

IMPORT = f"""
import sys
from pathlib import Path
import torch
from penstock.models.exchange.importing import ImportOptions, import_checkpoint

torch.set_num_threads(1)
run, source, report, into = map(Path, sys.argv[1:])
import_checkpoint(run, source, report, ImportOptions())  # imports all that an import needs
{LIMITED}
import_checkpoint(run, source, report, ImportOptions(), into=into, verifies=True)
"""


def configured(runner: Any, name: str, dtype: str, **fields: int) -> Path:
    """Writes a configuration with the Trainer's data, settings and curve."""
    path = runner.root / "tokens.bin"
    path.write_bytes(tokens(2 * STEPS).numpy().astype(np.uint16).tobytes())
    return runner.configure(
        name,
        {
            "model": {"dtype": dtype, "hf": {**LLAMA, **fields, "model_type": "llama"}},
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
    [("fp32", 1e-6), pytest.param("bf16", 2e-3, marks=pytest.mark.slow)],
)
def test_the_next_losses_are_those_of_a_trainer_that_stays(
    dtype: str, bound: float, runner: Any
) -> None:
    """The next 20 losses agree to 1e-6 in fp32, and to 2e-3 in bf16. There the Trainer rounds its
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
    assert not [note for note in report["notes"] if "_last_lr" in note or "base_lrs" in note]
    assert report["rates"][0]["checkpoint"] == report["rates"][0]["configuration"] > 0
    runner.train(config)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == pytest.approx(trained.losses[STEPS:], rel=bound, abs=0)
    assert trained.losses[0] - trained.losses[-1] > 0.1, "the model learns"


@pytest.mark.slow
def test_an_adapter_goes_on_with_its_moments(runner: Any) -> None:
    """The base comes from the model's folder, as the Trainer saves PEFT's adapter alone."""
    folder = runner.root / "model"
    new_model().save_pretrained(folder)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(new_model(), settings)
    trained = train(runner.root / "trainer", 2 * STEPS, saved_at=STEPS, model=model)
    config, run_dir = configured(runner, "moved", "fp32"), runner.root / "moved"
    fields = yaml.safe_load(config.read_text())
    fields["model"] = {"dtype": "fp32", "path": str(folder)}
    fields["adapter"] = {"r": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}
    config.write_text(yaml.safe_dump(fields))
    words = ("--config", config, "--run-dir", run_dir, "--verify")
    code, output = runner.call("import", trained.path, *words)
    assert code == 0, output
    runner.train(config)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == pytest.approx(trained.losses[STEPS:], rel=1e-6, abs=0)


@pytest.mark.slow
def test_an_import_takes_the_memory_of_a_part_of_the_state(runner: Any) -> None:
    """A state over 8 times the limit is written and compared, with the same bytes."""
    source = saved_untrained(runner.root / "checkpoint-1", new_model(**LARGE))
    state = open_checkpoint(source)
    assert sum(tensor.num_bytes for tensor in state.tensors) > 8 * LIMIT
    config, run_dir = configured(runner, "large", "fp32", **LARGE), runner.root / "large"
    code, output = runner.call("import", source, "--config", config, "--run-dir", run_dir)
    assert code == 0, output
    into = runner.root / "into"
    words = [sys.executable, "-c", IMPORT, run_dir, source, runner.root / "report.json", into]
    root = Path(__file__).parents[2]
    assert subprocess.run(list(map(str, words)), cwd=root, timeout=500).returncode == 0
    files = sorted((run_dir / "state" / "step-00000001").glob("block-*"))
    assert len(files) == LARGE["num_hidden_layers"] + 2
    for path in files:
        assert (into / path.name).read_bytes() == path.read_bytes()
