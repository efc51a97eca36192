"""Fine-tuning models from folders as the Hub has them: parity, resume, export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from penstock.protocol.run.rundir import RunDirectory
from tests.folders import save_model
from tests.system.test_parity import check_parity_of, final_weights

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_GROUPED,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {**_SIZES, "intermediate_size": 48},
    "opt": {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt2": {**_SIZES, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}
CASES = [
    pytest.param("qwen3_moe", False, id="qwen3_moe"),
    *(pytest.param(name, True, id=f"{name}-resumed", marks=pytest.mark.slow) for name in FAMILIES),
]


@pytest.mark.parametrize(("model_type", "resumed"), CASES)
def test_fine_tuning_a_folder(runner: Any, tmp_path: Path, model_type: str, resumed: bool) -> None:
    """Own tokenizer, same losses and weights as plain PyTorch, also over a resume, and an export
    that transformers loads; the folder is needed no more by then.
    """
    logging.disable_progress_bar()
    folder = tmp_path / "model"
    theirs = save_model(folder, model_type, **FAMILIES[model_type])
    names = set(load_file(folder / "model.safetensors"))
    changes = {
        "model": {"hf": None, "path": str(folder)},
        "data": {"tokenizer": None},
        "train": {"steps": 12, "clip_grad_norm": None},
        "optimizer": {"schedule": "constant"},
    }
    config = runner.configure("run", changes)
    if resumed:
        runner.train(config, "--set", "train.steps=6")
    run_dir = runner.train(config)
    assert RunDirectory(run_dir).config.data.tokenizer == str(folder)
    check_parity_of(run_dir, clip=False)
    text = "def penstock():\n    return '<|im_end|>'\n"
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    shutil.rmtree(folder)
    code, output = runner.call("export", str(run_dir), "--format", "hf", str(tmp_path / "out"))
    assert code == 0, output
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(theirs) and loaded.generation_config.temperature == 0.5
    ours = dict(loaded.named_parameters())
    for name, weights in final_weights(run_dir).items():
        assert torch.equal(ours[name], torch.from_numpy(weights)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "fp32"), (1e5, "fp16")])
def test_weights_that_no_training_survives_are_named(
    runner: Any, tmp_path: Path, value: float, dtype: str
) -> None:
    """Before the first step, with the file and the place."""
    logging.disable_progress_bar()
    folder, name = tmp_path / "model", "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
    save_model(folder, "gpt_neox", **FAMILIES["gpt_neox"])
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    changes = {
        "model": {"hf": None, "path": str(folder), "dtype": dtype},
        "data": {"tokenizer": None},
    }
    code, output = runner.call("train", str(runner.configure("run", changes)))
    assert code == 2, output
    assert f"model.safetensors: {name} has 1 number that" in output and "at [3, 5]" in output
