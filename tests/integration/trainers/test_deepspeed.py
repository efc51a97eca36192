"""DeepSpeed in an environment of its own: a training moves from it to Penstock, and back.

Both train the same rows with the same settings. The losses after the move are those of DeepSpeed
without a move.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.models.exchange.readers import open_checkpoint
from tests.integration.trainers.environments import DEEPSPEED, answer, environment
from tests.system import conftest as H

pytestmark = pytest.mark.integration

STEPS, MOVED, ROWS, LENGTH, VOCABULARY = 40, 20, 4, 16, 260
OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
MODULE = "tests.integration.trainers.deepspeed_training"
TOLERANCE = 1e-6
runner = H.runner


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with DeepSpeed."""
    return environment(tmp_path_factory.mktemp("deepspeed"), DEEPSPEED)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(folder)
    return folder


def rows() -> list[list[list[int]]]:
    """Returns token ids by step, row and position."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 250, (STEPS, ROWS, LENGTH), generator=generator)
    values: list[list[list[int]]] = ids.tolist()
    return values


def deepspeed_losses(python: Path, folder: Path, model: Path, **changes: Any) -> Sequence[float]:
    """Trains there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = {"model": str(model), "rows": rows(), "ranks": 2, "optimizer": OPTIMIZER}
    path = folder / "settings.json"
    path.write_text(json.dumps({**settings, "steps": [0, STEPS], "port": port, **changes}))
    losses: Sequence[float] = answer(python, MODULE, str(path))
    return losses


def configured(runner: Any, model: Path, name: str, **changes: Any) -> Path:
    """Returns a configuration with DeepSpeed's settings and rows."""
    data = runner.root / "rows.jsonl"
    lines = [json.dumps({"input_ids": row, "labels": row}) for step in rows() for row in step]
    data.write_text("\n".join(lines))
    fields = {
        "run": {"name": name, "dir": str(runner.root / name)},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {
            **{"sources": [{"path": str(data)}], "tokenizer": "byte", "sequence_length": LENGTH},
            **{"packing": "none", "shuffle": False},
        },
        "train": {"steps": STEPS, "global_batch": ROWS, "clip_grad_norm": None, **changes},
        "optimizer": {**OPTIMIZER, "warmup_steps": 0, "schedule": "constant"},
        "cluster": {"workers": 1},
    }
    path: Path = runner.root / f"{name}.yaml"
    path.write_text(json.dumps(fields))
    return path


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in H.metrics(run_dir)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_moves_here_and_back(
    stage: int, python: Path, model: Path, runner: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "deepspeed"
    zero = {"stage": stage, "groups": stage != 3}
    stayed = deepspeed_losses(
        python, tmp_path, model, **zero, save=str(saved), tag="moved", save_at=MOVED
    )
    decay = (
        {}
        if stage != 3
        else {"optimizer": {"groups": [{"match": ["model", "lm_head"], "weight_decay": 0.1}]}}
    )
    config = configured(runner, model, "moved")
    if decay:
        config.write_text(json.dumps(H.merge(json.loads(config.read_text()), decay)))
    run_dir = runner.root / "moved"
    words = ("import", saved, "--config", config, "--run-dir", run_dir, "--verify")
    code, output = runner.call(*words)
    assert code == 0, output
    out = tmp_path / "back"
    code, output = runner.call("export", run_dir, out, "--format", "universal", "--verify")
    assert code == 0, output
    _compare(saved, out)
    back = deepspeed_losses(
        python, tmp_path, model, **zero, steps=[MOVED, STEPS], load=str(out), universal=True
    )
    runner.train(config)
    assert losses_of(run_dir)[-(STEPS - MOVED) :] == pytest.approx(stayed[MOVED:], rel=TOLERANCE)
    assert back == pytest.approx(stayed[MOVED:], rel=TOLERANCE)


def _compare(saved: Path, out: Path) -> None:
    """Compares the numbers of DeepSpeed's checkpoint with those of the export."""
    first = {(t.name, t.role): t.load() for t in open_checkpoint(saved).tensors}
    second = {(t.name, t.role): t.load() for t in open_checkpoint(out).tensors}
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
