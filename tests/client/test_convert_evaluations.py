"""``penstock convert``: held-out data, steps of evaluations, the best state and the early end."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.client.test_convert import (
    Conversion,
    config_of,
    fates,
    folder,
    made,
    minimal,
    results,
)

__all__ = ["folder"]

TRL = {"dataset_name": "data", "eval_strategy": "steps", "completion_only_loss": False}
LLAMA_FACTORY = {"eval_dataset": "held", "eval_strategy": "steps"}
AXOLOTL = {"test_datasets": [{"path": "t.jsonl", "type": "alpaca", "split": "train"}]}
"""Keys of evaluations by files of their own."""

BEST = {"load_best_model_at_end": True, "eval_steps": 50, "save_steps": 50}
HELD = {"name": "held", "registry": "data/dataset_info.json", "entry": "held"}


def converted(tool: str, **keys: Any) -> Conversion:
    """The conversion of the shortest file with more keys."""
    more = {"trl": TRL, "llamafactory": LLAMA_FACTORY, "axolotl": AXOLOTL}[tool]
    return made(tool, yaml.safe_dump(yaml.safe_load(minimal(tool)) | more | keys))


def sets(conversion: Conversion) -> list[dict[str, Any]]:
    """The sets of the configuration; none without evaluations."""
    listed: list[dict[str, Any]] = conversion.config.get("eval", {}).get("sets", [])
    return listed


def why(conversion: Conversion, key: str) -> str:
    """The reason of a dropped key."""
    return next(entry["why"] for entry in conversion.dropped if entry["key"] == key)


@pytest.mark.parametrize(
    ("tool", "keys", "expected"),
    [
        ("trl", {}, [{"name": "eval", "path": "data", "split": "test"}]),
        (
            "trl",
            {"dataset_test_split": "test_sft[:5%]", "dataset_train_split": "train_sft"},
            [{"name": "eval", "path": "data", "split": "test_sft[:5%]"}],
        ),
        (
            "trl",
            {"dataset_text_field": "body"},
            [{"name": "eval", "path": "data", "columns": {"text": "body"}, "split": "test"}],
        ),
        ("llamafactory", {}, [HELD]),
        (
            "llamafactory",
            {"eval_dataset": "held, b c", "max_samples": 9, "eval_on_each_dataset": True},
            [{**HELD, "limit": 9}, {**HELD, "name": "b_c", "entry": "b c", "limit": 9}],
        ),
        ("axolotl", {}, [{"name": "eval", "path": "t.jsonl", "format": "stanford"}]),
        (
            "axolotl",
            {"test_datasets": [{"path": "a", "type": "alpaca"}, {"path": "b.jsonl"}]},
            [
                {"name": "eval-1", "path": "a", "split": "test", "format": "stanford"},
                {"name": "eval-2", "path": "b.jsonl", "split": "test", "format": "tokens"},
            ],
        ),
    ],
)
def test_held_out_data_are_sets(
    tool: str, keys: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    conversion = converted(tool, eval_steps=50, **keys)
    assert sets(conversion) == expected and not conversion.changes_result
    assert [each.every for each in config_of(conversion).evaluation_sets] == [50] * len(expected)


@pytest.mark.parametrize(
    ("tool", "keys", "every"),
    [
        ("trl", {}, 10),
        ("trl", {"logging_steps": 7}, 7),
        ("trl", {"eval_steps": 0.1, "max_steps": 95}, 10),
        ("trl", {"eval_steps": 0.1}, None),
        ("trl", {"eval_strategy": "epoch"}, None),
        ("trl", {"eval_strategy": False}, None),
        ("llamafactory", {}, 500),
        ("llamafactory", {"eval_strategy": "no"}, None),
        ("axolotl", {}, None),
        ("axolotl", {"evals_per_epoch": 4, "num_epochs": 2, "max_steps": 80}, 10),
        ("axolotl", {"evals_per_epoch": 1, "num_epochs": 1, "max_steps": 80}, None),
    ],
)
def test_steps_between_evaluations(tool: str, keys: dict[str, Any], every: int | None) -> None:
    conversion = converted(tool, **keys)
    assert conversion.config["train"].get("eval_every") == every
    assert bool(sets(conversion)) == (every is not None)
    assert not conversion.changes_result


@pytest.mark.parametrize(("keys", "every"), [({"eval_strategy": "epoch"}, 2), ({}, 2)])
def test_passes_are_counted_where_records_fill_all_batches(
    keys: dict[str, Any], every: int
) -> None:
    """Eight records at a batch of four; a quarter of four passes."""
    data = {"dataset_name": "prompts.jsonl", "dataset_test_split": "train"}
    sizes = {"per_device_train_batch_size": 4, "num_train_epochs": 4, "eval_steps": 0.25}
    conversion = converted("trl", **data, **sizes, **keys)
    assert conversion.config["train"]["eval_every"] == every
    assert sets(conversion) == [{"name": "eval", "path": "prompts.jsonl"}]


@pytest.mark.parametrize(
    ("tool", "keys", "name"),
    [
        ("trl", {}, "eval"),
        ("trl", {"metric_for_best_model": "eval_loss", "greater_is_better": False}, "eval"),
        ("llamafactory", {"early_stopping_steps": 3}, "held"),
        (
            "llamafactory",
            {
                "eval_dataset": "a,held",
                "eval_on_each_dataset": True,
                "metric_for_best_model": "eval_held_loss",
                "early_stopping_steps": 3,
            },
            "held",
        ),
        ("axolotl", {"early_stopping_patience": 3}, "eval"),
        ("axolotl", {"load_best_model_at_end": None, "early_stopping_patience": 3}, "eval"),
    ],
)
def test_the_best_state_and_the_early_end(tool: str, keys: dict[str, Any], name: str) -> None:
    conversion = converted(tool, **{**BEST, **keys})
    assert not conversion.changes_result
    assert conversion.config["train"]["keep_best"] == f"{name}.loss"
    stops = {"metric": f"{name}.loss", "patience": 3}
    assert conversion.config["train"].get("stop_early") == (None if tool == "trl" else stops)
    config_of(conversion)


LOADS = {"load_best_model_at_end"}


@pytest.mark.parametrize(
    ("tool", "keys", "dropped", "word"),
    [
        ("trl", {"metric_for_best_model": "eval_bleu"}, LOADS, "the metric 'bleu' of the trainer"),
        ("trl", {"greater_is_better": True}, LOADS, "the least loss is the best"),
        ("trl", {"eval_strategy": "no"}, LOADS, "no evaluation is converted"),
        ("trl", {"save_steps": 100}, LOADS, "another step may be the best"),
        ("trl", {"save_strategy": "best"}, set(), ""),
        ("trl", {"eval_delay": 100}, {"eval_delay"}, ""),
        (
            "llamafactory",
            {"eval_dataset": "a,b", "early_stopping_steps": 2},
            {*LOADS, "early_stopping_steps"},
            "the metric 'loss' of the trainer",
        ),
    ],
)
def test_another_choice_of_the_state_changes_the_result(
    tool: str, keys: dict[str, Any], dropped: set[str], word: str
) -> None:
    conversion = converted(tool, **{**BEST, **keys})
    assert results(conversion) == dropped
    assert all(word in why(conversion, key) for key in LOADS & dropped)


def test_axolotl_loads_no_best_state_without_its_conditions() -> None:
    conversion = converted("axolotl", load_best_model_at_end=True, eval_steps=50, save_steps=70)
    assert fates(conversion)["load_best_model_at_end"] == "none"
    assert "keep_best" not in conversion.config["train"]


@pytest.mark.parametrize(
    ("tool", "key", "share", "words"),
    [
        ("llamafactory", "val_size", 0.1, ("it draws those", '"split": "train[:90%]"')),
        ("llamafactory", "val_size", 200, ("it draws those", '"split": "train[90%:]"')),
        ("axolotl", "val_set_size", 0.25, ("it draws those", "split: train[:75%] of the source")),
        ("axolotl", "val_set_size", 0.001, ("it draws those", "split: train[99%:] of a set")),
    ],
)
def test_a_share_of_the_training_data_is_another_share(
    tool: str, key: str, share: float, words: tuple[str, ...]
) -> None:
    conversion = made(tool, minimal(tool), **{key: share, "eval_strategy": "steps"}, eval_steps=5)
    assert results(conversion) == {key}
    assert all(word in why(conversion, key) for word in words)
    held_out = share < 1
    assert sets(conversion) == ([{"name": "eval"}] if held_out else [])
    assert conversion.config["data"].get("eval_fraction") == (share if held_out else None)
    assert config_of(conversion).holds_out is held_out


def test_axolotl_holds_out_the_end_of_data_that_it_does_not_shuffle() -> None:
    keys = {"val_set_size": 0.1, "curriculum_sampling": True, "eval_steps": 5}
    assert "rounds the number" in why(made("axolotl", minimal("axolotl"), **keys), "val_set_size")


def test_segments_of_axolotl_have_no_format() -> None:
    data = [{"path": "a.jsonl", "type": "input_output"}]
    conversion = made("axolotl", minimal("axolotl"), datasets=data)
    assert results(conversion) == {"datasets[0].type"}
    assert "input_ids and labels (-100 where label is false)" in why(conversion, "datasets[0].type")
