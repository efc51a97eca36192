"""Whatever type of model somebody names: it works, or one sentence says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from penstock.config.schema import parse_config
from penstock.host.errors import ConfigError
from penstock.models.prepare import prepare
from penstock.protocol.run.rundir import RunDirectory

REFUSED = {
    "rwkv": "cannot be taken apart into layers",
    "blt": "no hidden_size",
    "bert": "'bert' is an encoder, which sees the words that it would have to predict; set"
    " data.objective: masked",
    "roberta": "'roberta' is an encoder",
    "t5": "model_type = 't5': transformers has no language model of it",
    "vit": "model_type = 'vit': transformers has no language model of it",
    "gemma3": "its language model is one part of several; give 'gemma3_text' by itself",
    "nougat": "transformers has no configuration of this type without others to go with it",
    "apertus": "does not say how to fill its buffer model.layers.0.mlp.act_fn.beta",
    "ctrl": "cannot be taken apart into layers",
    "xlm": "cannot be taken apart into layers",
    "cwm": "give model.hf.bos_token_id",
}


def outcome(model_type: str, run_dir: Path, objective: str = "next-token") -> str | None:
    """Why a type with the sizes of its first model is refused, ``None`` where it is not.

    Raises:
        Exception: whatever is no refusal.
    """
    config = parse_config(
        {
            "model": {"hf": {"model_type": model_type}},
            "data": {"path": "@stdlib", "sequence_length": 8, "objective": objective},
        }
    )
    try:
        prepare(config, run_dir, table_only=True)
    except ConfigError as error:
        return str(error)
    return None


def is_sentence(complaint: str) -> bool:
    """One line of bearable length without names of Python's exceptions."""
    words = re.search(r"\b\w+(Error|Exception)\b|Traceback|internal error", complaint)
    return words is None and "\n" not in complaint and len(complaint) < 600


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusals_are_sentences(model_type: str, tmp_path: Path) -> None:
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers does not know {model_type}")
    complaint = outcome(model_type, tmp_path)
    assert complaint is not None and REFUSED[model_type] in complaint
    assert complaint.startswith(("model", "data.objective")) and is_sentence(complaint)


def test_what_is_masked_must_suit_the_model(tmp_path: Path) -> None:
    complaint = outcome("mamba", tmp_path, "masked")
    assert complaint is not None and is_sentence(complaint)
    assert "'mamba' is a decoder, which sees no words after a masked one" in complaint


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "modernbert"])
def test_encoders(model_type: str, tmp_path: Path) -> None:
    assert outcome(model_type, tmp_path, "masked") is None
    head = RunDirectory(tmp_path).table.blocks[-1]
    assert len(head.borrows) == 1, "the embedding; a bias that goes by two names is one tensor"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "vit"}, "= 'vit': transformers has no language model of it"),
        ({"model_type": "mllama"}, "= 'mllama': its language model is one part of several"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            "= 'own': transformers knows no such type",
        ),
        ({"model_type": "mamba", "num_hidden_layers": 0}, "no num_hidden_layers"),
        ({"model_type": "llama", "hidden_size": "many"}, "hidden_size"),
        (["llama"], "config.json"),
    ],
)
def test_folders_of_other_kinds(fields: Any, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = parse_config(
        {
            "model": {"path": str(tmp_path)},
            "data": {"path": "@stdlib", "sequence_length": 8, "tokenizer": "byte"},
        }
    )
    with pytest.raises(ConfigError) as caught:
        prepare(config, tmp_path, table_only=True)
    assert complaint in str(caught.value) and is_sentence(str(caught.value))


@pytest.mark.slow
def test_every_type_that_transformers_knows(tmp_path: Path) -> None:
    """With the sizes of its first model, on the meta device: a table or a sentence."""
    logging.set_verbosity_error()
    complaints: dict[str, str | None] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        run_dir = tmp_path / model_type
        run_dir.mkdir()
        complaint = outcome(model_type, run_dir)
        if complaint is not None and "set data.objective: masked" in complaint:
            complaint = outcome(model_type, run_dir, "masked")
        complaints[model_type] = complaint
    unclear = {name: text for name, text in complaints.items() if text and not is_sentence(text)}
    assert unclear == {}
    accepted = sorted(name for name, text in complaints.items() if text is None)
    assert len(complaints) > 300 and len(accepted) > 90
    assert {"llama", "gpt2", "qwen3_moe", "mixtral", "gpt_neox", "opt"} <= set(accepted)
    assert {"mamba", "mamba2", "falcon_mamba", "bert", "roberta", "modernbert"} <= set(accepted)
