"""The loss of routers and the mixture of data sets in files of TRL."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from penstock.client.convert.trl import COEFFICIENTS, coefficient_of
from penstock.config.hub_names import fetch_data
from tests.client.test_convert import fates, folder, made, minimal, refusal, results

__all__ = ["folder"]
KEY = "router_aux_loss_coef"
QWEN = {"model_type": "qwen3_moe", "num_experts": 4}
WITHOUT = "the loss is that of the tokens alone; set router_aux_loss_coef: 0.0 for equal losses"


def written(fields: dict[str, Any]) -> str:
    """The folder of a model with these fields in its config.json."""
    path = Path("moe")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("fields", "given", "value"),
    [
        (QWEN | {KEY: 0.01}, None, 0.01),
        (QWEN, None, 0.001),
        ({"model_type": "olmoe"}, None, 0.01),
        (QWEN | {KEY: 0.01}, 0.5, 0.5),
        (QWEN | {KEY: 0.0}, None, None),
        (QWEN | {KEY: 0.01}, 0.0, None),
        ({"model_type": "deepseek_v3"}, None, None),
        ({"model_type": "deepseek_v3", KEY: 0.02}, None, 0.02),
        ({"model_type": "my_moe", KEY: 0.02, "output_router_logits": False}, None, 0.02),
        ({"model_type": "granitemoehybrid", "num_local_experts": 0}, None, None),
        ({"model_type": "qwen3_5_moe", "text_config": {"num_experts": 8, KEY: 0.3}}, None, None),
        (
            {
                "model_type": "qwen3_5_moe",
                "text_config": {"model_type": "qwen3_5_moe_text", KEY: 0.3},
            },
            None,
            0.3,
        ),
        ({"model_type": "llama"}, None, None),
    ],
)
def test_the_loss_of_routers_changes_the_result(
    folder: Path, fields: dict[str, Any], given: float | None, value: float | None, pairs: bool
) -> None:
    keys = {} if given is None else {KEY: given}
    data = {"dataset_name": "pairs.json", "beta": 0.1} if pairs else {}
    if "text_config" in fields and "model_type" not in fields["text_config"]:
        value = 0.3  # the outer type stands for that of the texts
    conversion = made("trl", minimal("trl"), model_name_or_path=written(fields), **keys, **data)
    dropped = [entry for entry in conversion.dropped if entry["key"] == KEY]
    if value is None:
        assert dropped == []
        assert not results(conversion)
        return
    (entry,) = dropped
    assert (entry["value"], entry["effect"]) == (value, "result")
    assert entry["why"].endswith(f"is not added, and {WITHOUT}")
    assert conversion.changes_result


def test_the_loss_of_routers_of_other_models(folder: Path) -> None:
    absent = made("trl", minimal("trl"), model_name_or_path="absent")
    (note,) = [line for line in absent.remarks() if line.startswith(KEY)]
    assert note == (
        f"{KEY}: absent/config.json cannot be read: with a mixture of experts, TRL adds the"
        f" routers' loss by default, and Penstock does not; set {KEY}: 0.0 for equal losses"
    )
    assert not absent.changes_result
    off = made("trl", minimal("trl"), model_name_or_path="absent", **{KEY: 0.0})
    (entry,) = [entry for entry in off.mapped if entry["key"] == KEY]
    assert (entry["value"], entry["to"]) == (0.0, {}) and not off.changes_result
    assert results(made("trl", minimal("trl"), model_name_or_path="absent", **{KEY: 0.1})) == {KEY}
    dense = made(
        "trl", minimal("trl"), model_name_or_path=written({"model_type": "llama"}), **{KEY: 0.1}
    )
    assert fates(dense)[KEY] == "none" and not dense.changes_result


def test_the_loss_of_routers_of_llamafactory(folder: Path) -> None:
    """LLaMA-Factory adds the loss with a coefficient alone: neither by default nor with 0."""
    key = "moe_aux_loss_coef"
    for keys in ({}, {key: 0.0}, {key: None}):
        conversion = made("llamafactory", minimal("llamafactory"), **keys)
        assert key not in results(conversion)
    assert key in results(made("llamafactory", minimal("llamafactory"), **{key: 0.001}))


def test_coefficients_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs: dict[str, float] = {}
    for kind in CONFIG_MAPPING:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = CONFIG_MAPPING[kind]().get_text_config()
        except Exception:  # types of encoders alone have no configuration without arguments
            continue
        if hasattr(text, "output_router_logits"):
            theirs[kind] = getattr(text, "router_aux_loss_coef", 0.0)
    assert theirs == COEFFICIENTS
    assert coefficient_of({"model_type": "mixtral", KEY: True}) == 0.0


def test_a_mixer_of_data_sets_is_converted(folder: Path) -> None:
    mixer = {"chats.jsonl": 1.0, "prompts.jsonl": 0.3, "set.parquet": 0.5, "org/chats": 1}
    conversion = made(
        "trl",
        minimal("trl"),
        dataset_name=None,
        dataset_mixer=mixer,
        dataset_splits=["train_sft", "test_sft"],
    )
    assert conversion.config["data"]["sources"] == [
        {"path": "chats.jsonl", "split": "train_sft"},
        {"path": "org/chats", "split": "train_sft"},
        {"path": "prompts.jsonl", "split": "train_sft", "limit": 2},
        {"path": "set.parquet", "split": "train_sft"},
    ]
    why = {entry["key"]: entry["why"] for entry in conversion.dropped}
    assert why["dataset_mixer.set.parquet"].startswith("takes this share of the records")
    assert fetch_data("org/chats") in why["dataset_mixer.org/chats"]
    assert results(conversion) == {
        "dataset_mixer.set.parquet",
        "dataset_mixer.org/chats",
        "completion_only_loss",
    }
    whole = made("trl", minimal("trl"), dataset_name=None, dataset_mixer={"chats.jsonl": 1.0})
    assert whole.config["data"]["sources"] == [{"path": "chats.jsonl"}]
    assert not whole.changes_result
    words = refusal("trl", minimal("trl"), dataset_name=None, dataset_mixer={"a": "all"})
    assert "dataset_mixer.a = 'all': needs a number" in words
    words = refusal(
        "trl", minimal("trl"), dataset_name=None, dataset_mixer={"a": 1}, dataset_splits=["test"]
    )
    assert "dataset_splits = ['test']: needs a split to train on" in words
