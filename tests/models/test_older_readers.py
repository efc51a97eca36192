"""The config.json of exports has older keys that say what the new ones say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from penstock.models.checkpoints.older_readers import with_older_keys

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("model_type", "fields", "older"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}),
        (
            "qwen2",
            {"rope_parameters": YARN},
            {"rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}},
        ),
        ("phi", {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
        (
            "phi3",
            {"rope_parameters": LONG, "original_max_position_embeddings": 32, "pad_token_id": 0},
            {"rope_scaling": {"type": "longrope"} | {k: LONG[k] for k in list(LONG)[2:]}},
        ),
        ("gemma3_text", {}, {"rope_local_base_freq": 10000.0}),
        ("gpt2", {}, {}),
    ],
)
def test_both_kinds_of_keys_say_the_same(
    model_type: str, fields: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {} if model_type == "gpt2" else {"hidden_size": 32, "num_attention_heads": 4}
    config = AutoConfig.for_model(model_type, **sizes, **fields)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = with_older_keys(json.loads(path.read_text()))
    assert {key: written.get(key) for key in older} == older
    if rope := getattr(config, "rope_parameters", None):
        first = rope if "rope_theta" in rope else rope["full_attention"]
        assert written["rope_theta"] == first["rope_theta"]
    path.write_text(json.dumps(written))
    again = AutoConfig.from_pretrained(tmp_path)
    ours = {k: v for k, v in (getattr(again, "rope_parameters", None) or {}).items() if k != "type"}
    assert ours == (getattr(config, "rope_parameters", None) or {})


def test_an_export_is_not_quantized_and_names_its_type_twice() -> None:
    fields = with_older_keys({"dtype": "bfloat16", "quantization_config": {"bits": 4}})
    assert fields == {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
