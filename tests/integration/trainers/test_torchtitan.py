"""torchtitan in an environment of its own: a llama3 moves from it to Penstock.

Both train the same rows with the same settings. The losses after the move are those of torchtitan
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
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration.trainers.environments import TORCHTITAN, answer, environment
from tests.system import conftest as H

pytestmark = pytest.mark.integration

STEPS, MOVED, ROWS, LENGTH, VOCABULARY = 40, 20, 4, 17, 260
OPTIMIZER = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SIZES = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY}
MODULE = "tests.integration.trainers.torchtitan_training"
HF: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 16_384, "tie_word_embeddings": False},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}
runner = H.runner


def test_a_training_moves_here(runner: Any, tmp_path: Path) -> None:
    python = environment(tmp_path / "torchtitan", TORCHTITAN)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 250, (STEPS, ROWS, LENGTH), generator=generator).tolist()
    sizes = {**SIZES, "multiple_of": 8, "max_seq_len": 64}
    settings = {"rows": rows, "folder": str(tmp_path), "save_at": MOVED, "model": sizes}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({**settings, "optimizer": OPTIMIZER}))
    stayed = answer(python, MODULE, str(path))

    tensors = load_file(tmp_path / "initial.safetensors")
    width = tensors["model.layers.0.mlp.up_proj.weight"].shape[0]
    hf = {**HF, "intermediate_size": width}
    model = LlamaForCausalLM(LlamaConfig(**hf))
    model.load_state_dict(tensors)
    ids = torch.tensor(rows[0])
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(stayed[0], rel=1e-6)

    data = runner.root / "rows.jsonl"
    lines = [json.dumps({"input_ids": row, "labels": row}) for step in rows for row in step]
    data.write_text("\n".join(lines))
    groups = [{"match": ["model", "lm_head"], "weight_decay": OPTIMIZER["weight_decay"]}]
    fields = {
        "run": {"name": "moved", "dir": str(runner.root / "moved")},
        "model": {"hf": {**hf, "model_type": "llama"}, "dtype": "fp32"},
        "data": {
            **{"sources": [{"path": str(data)}], "tokenizer": "byte", "sequence_length": LENGTH},
            **{"packing": "none", "shuffle": False},
        },
        "train": {"steps": STEPS, "global_batch": ROWS, "clip_grad_norm": None},
        "optimizer": {**OPTIMIZER, "groups": groups, "warmup_steps": 0, "schedule": "constant"},
        "cluster": {"workers": 1},
    }
    config, run_dir = runner.root / "moved.yaml", runner.root / "moved"
    config.write_text(yaml.safe_dump(fields))
    words = ("--config", config, "--run-dir", run_dir, "--verify")
    code, output = runner.call("import", tmp_path / f"step-{MOVED}", *words)
    assert code == 0, output
    runner.train(config)
    losses = [line["loss"] for line in H.metrics(run_dir)]
    assert losses[-(STEPS - MOVED) :] == pytest.approx(stayed[MOVED:], rel=1e-6)
