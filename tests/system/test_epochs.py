"""Runs with a length in passes over the data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from penstock.protocol.run.rundir import RunDirectory
from tests.system import conftest as H

ROWS = 26
LENGTH = 32
BATCH = 4


def test_a_run_of_an_epoch_ends_after_its_rows_and_goes_on_to_the_second(runner: Any) -> None:
    text = runner.root / "text.txt"
    text.write_text("x" * (ROWS * LENGTH))  # with the end token, ROWS rows and their last labels
    changes = {
        "data": {"path": str(text), "tokenizer": "byte", "sequence_length": LENGTH},
        "train": {"global_batch": BATCH, "epochs": 1},
    }
    path = runner.configure("run", changes)
    path.write_text(_without_steps(path))
    run_dir = runner.train(path)
    first = math.ceil(ROWS / BATCH)
    assert [line["step"] for line in H.metrics(run_dir)] == list(range(1, first + 1))
    resolved = yaml.safe_load((run_dir / "resolved.yaml").read_text())
    assert resolved["train"]["epochs"] == 1.0 and "steps" not in resolved["train"]
    assert RunDirectory(run_dir).config.train.steps == first

    code, output = runner.call("train", str(path))
    assert code == 0 and f"all {first} steps are done and saved; raise train.epochs" in output

    code, output = runner.call("train", str(path), "--set", "train.epochs=2")
    second = math.ceil(2 * ROWS / BATCH)
    assert code == 0, output
    assert "changed: train.steps: " not in output
    assert "changed: train.epochs: 1.0 -> 2.0" in output
    assert [line["step"] for line in H.metrics(run_dir)] == list(range(1, second + 1))
    assert H.metrics(run_dir)[-1]["data_epoch"] == second * BATCH / ROWS

    code, output = runner.call("train", str(path), "--set", "train.epochs=1")
    assert code == 0 and f"all {first} steps are done and saved" in output, output
    code, output = runner.call("train", str(path), "--set", "optimizer.curve=transformers")
    assert code == 2 and "optimizer.curve: 'penstock' -> 'transformers'" in output


def test_emulated_devices_have_no_epochs(runner: Any) -> None:
    device = "emulated:analytic:V100-32:gpt3-1.3b"
    changes = {
        "model": {"hf": None, "dtype": "fp16"},
        "optimizer": {"grad_dtype": "bf16"},
        "train": {"epochs": 1},
        "cluster": {"device": device},
    }
    path = runner.configure("run", changes)
    path.write_text(_without_steps(path))
    code, output = runner.call("train", str(path))
    assert code == 2 and f"train.epochs 1: {device} makes up its data" in output
    code, output = runner.call("plan", str(path))
    assert code == 0, output


def _without_steps(path: Path) -> str:
    """The configuration of a file without the steps that the runner's base has."""
    values = yaml.safe_load(path.read_text())
    del values["train"]["steps"]
    return str(yaml.safe_dump(values))
