"""torchtitan in an environment of its own: models move from it to Penstock, and back.

Both train the same rows with the same settings. The losses after a move are those of torchtitan
without a move.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integration.trainers.environments import TORCHTITAN, answer, environment
from tests.system import conftest as H

pytestmark = pytest.mark.integration

STEPS, MOVED, BACK, ROWS, LENGTH, VOCABULARY = 60, 20, 40, 4, 17, 260
"""Steps there, of which the run here makes those from ``MOVED`` on; ``BACK``: the second move."""
TOLERANCE = 1e-6
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SIZES = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY}
MODULE = "tests.integration.trainers.torchtitan_training"
HF: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 16_384},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}
QWEN: dict[str, Any] = {
    **{"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 8, "max_position_embeddings": 64},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
QWEN_SIZES: dict[str, Any] = {"head_dim": 8, "hidden_dim": 24, "max_seq_len": 64}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": ({"multiple_of": 8, "max_seq_len": 64}, LLAMA),
    "qwen3": (QWEN_SIZES, QWEN),
    "tied": (
        {**QWEN_SIZES, "enable_weight_tying": True},
        {**QWEN, "tie_word_embeddings": True},
    ),
}
"""Sizes there, and transformers' configuration."""
runner = H.runner


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with torchtitan."""
    return environment(tmp_path_factory.mktemp("torchtitan"), TORCHTITAN)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_moves_here_and_back(
    family: str, python: Path, runner: Any, tmp_path: Path
) -> None:
    sizes, hf = FAMILIES[family]
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 250, (STEPS, ROWS, LENGTH), generator=generator).tolist()
    settings = {
        **{"family": "llama3" if family == "llama3" else "qwen3", "rows": rows},
        **{"model": {**SIZES, **sizes}, "optimizer": OPTIMIZER, "save_every": MOVED},
    }

    def trained(name: str, **others: str) -> list[float]:
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "settings.json"
        path.write_text(json.dumps({**settings, "folder": str(folder), **others}))
        losses: list[float] = answer(python, MODULE, str(path))
        return losses

    stayed = trained("there")
    tensors = load_file(tmp_path / "there" / "initial.safetensors")
    width = tensors["model.layers.0.mlp.up_proj.weight"].shape[0]
    hf = {**HF, **hf, "intermediate_size": width}
    _compare_first(hf, tensors, rows[0], stayed[0])

    config, run_dir = _configured(runner, hf, rows), runner.root / "moved"
    words = ("--config", config, "--run-dir", run_dir, "--verify")
    code, output = runner.call("import", tmp_path / "there/checkpoint" / f"step-{MOVED}", *words)
    assert code == 0, output
    runner.train(config)
    losses = [line["loss"] for line in H.metrics(run_dir)]
    assert losses == pytest.approx(stayed[MOVED:], rel=TOLERANCE)

    out = tmp_path / "out"
    options = ("--format", "dcp", "--names", "torchtitan", "--step", str(BACK), "--verify")
    code, output = runner.call("export", run_dir, out, *options)
    assert code == 0, output
    back = trained("back", load=str(out))
    assert back == pytest.approx(stayed[BACK:], rel=TOLERANCE)
    for name, values in (("moved", (losses, stayed[MOVED:])), ("back", (back, stayed[BACK:]))):
        print(family, name, max(abs(a / b - 1) for a, b in zip(*values, strict=True)))


def _compare_first(
    hf: dict[str, Any], tensors: dict[str, torch.Tensor], rows: list[list[int]], loss: float
) -> None:
    """Compares transformers' first loss with torchtitan's."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    ids = torch.tensor(rows)
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss, rel=TOLERANCE)


def _configured(runner: Any, hf: dict[str, Any], rows: list[list[list[int]]]) -> Path:
    """Returns a configuration with torchtitan's settings, curve and rows."""
    data = runner.root / "rows.jsonl"
    lines = [json.dumps({"input_ids": row, "labels": row}) for step in rows for row in step]
    data.write_text("\n".join(lines))
    groups = [{"match": ["model", "lm_head"], "weight_decay": OPTIMIZER["weight_decay"]}]
    fields = {
        "run": {"name": "moved", "dir": str(runner.root / "moved")},
        "model": {"hf": hf, "dtype": "fp32"},
        "data": {
            **{"sources": [{"path": str(data)}], "tokenizer": "byte", "sequence_length": LENGTH},
            **{"packing": "none", "shuffle": False},
        },
        "train": {
            **{"steps": STEPS, "global_batch": ROWS, "clip_grad_norm": None},
            "save_every": MOVED,
        },
        "optimizer": {
            **{**OPTIMIZER, "groups": groups, "warmup_steps": 0, "min_lr": 0.0},
            **{"schedule": "linear", "curve": "transformers"},
        },
        "cluster": {"workers": 1},
    }
    config: Path = runner.root / "moved.yaml"
    config.write_text(yaml.safe_dump(fields))
    return config
