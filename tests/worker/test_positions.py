"""Sequences beyond ``max_position_embeddings``: losses and gradients are those of transformers, and
only a table of positions is a wall.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError
from penstock.models.prepare import prepare
from tests.worker.folder_parity import compare

POSITIONS, LENGTH = 16, 48
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": POSITIONS},
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": POSITIONS, **_FACTORS},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": POSITIONS,
    },
}


def save(folder: Path, model_type: str, **fields: Any) -> Path:
    """Saves a random model of a type whose every parameter matters; returns the folder."""
    disable_progress_bar()
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0).add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("length", [POSITIONS, LENGTH])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies_are_no_wall(kind: str, length: int, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    folder = save(tmp_path / "model", "llama", rope_parameters=rope)
    compared = compare(folder, tmp_path / "run", length=length)
    assert compared.loss < 1e-6 and compared.gradients < 1e-5 and compared.exported == []


@pytest.mark.parametrize("model_type", ["gpt_neox", "bloom", "xglm"])
def test_other_positions_without_a_wall(model_type: str, tmp_path: Path) -> None:
    renamed = {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
    fields = {**renamed, **none} if model_type == "xglm" else {"hidden_dropout": 0.0}
    folder = save(tmp_path / "model", model_type, **fields)
    compared = compare(folder, tmp_path / "run", length=LENGTH)
    assert compared.loss < 1e-6 and compared.gradients < 1e-5 and compared.exported == []


TABLES: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({}, POSITIONS),
    "opt": ({"word_embed_proj_dim": 16}, POSITIONS),
    "biogpt": ({}, POSITIONS),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]]}, POSITIONS),
    "gptj": ({"rotary_dim": 8}, POSITIONS),
    "bert": ({}, POSITIONS),
    "roberta": ({"pad_token_id": 1}, POSITIONS - 2),
}
"""Type -> keys, and the positions that its table has; roberta's begins after its padding token."""


def accepted(hf: dict[str, Any], folder: Path, **data: Any) -> None:
    """Cuts the model of a configuration into blocks.

    Raises:
        ConfigError: the model is refused.
    """
    AutoConfig.for_model(**hf).save_pretrained(folder)
    text = {"path": "@stdlib", "tokenizer": "byte"}
    config = parse_config({"model": {"path": str(folder)}, "data": {**text, **data}})
    prepare(config, folder, table_only=True)


@pytest.mark.parametrize("model_type", TABLES)
def test_a_table_of_positions_is_a_wall(model_type: str, tmp_path: Path) -> None:
    fields, rows = TABLES[model_type]
    hf = {"model_type": model_type, **SIZES, "vocab_size": 260, "pad_token_id": 2, **fields}
    objective = "masked" if model_type in ("bert", "roberta") else "next-token"
    accepted(hf, tmp_path, sequence_length=rows, objective=objective)
    with pytest.raises(ConfigError) as caught:
        accepted(hf, tmp_path, sequence_length=rows + 1, objective=objective)
    assert str(caught.value) == (
        f"data.sequence_length = {rows + 1}: the model has a table of {rows} positions; give at"
        " most that"
    )
