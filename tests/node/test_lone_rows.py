"""Rows that would change each other's rotary frequencies have micro-batches of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.host.errors import ConfigError
from tests.models.test_apart import LONGROPE

CAUSE = (
    "samples have 6 to 30 tokens, and in this model a sample beyond 24 changes the rotary"
    " frequencies of the other rows of its micro-batch; set"
)


def config(folder: Path, micro_batch: int | str, lengths: list[int], **data: Any) -> Config:
    """A run over samples of these lengths."""
    records = [{"input_ids": [3 + n % 200 for n in range(length)]} for length in lengths]
    path = folder / "ids.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = {"path": str(path), "format": "tokens"}
    keys = {"tokenizer": "byte", "sequence_length": 48, "sources": [source], **data}
    return parse_config(
        {
            "model": {"hf": LONGROPE},
            "data": keys,
            "train": {"steps": 1, "global_batch": 2, "micro_batch": micro_batch},
        }
    )


def test_lengths_on_both_sides_of_a_limit_take_micro_batches_of_one_row(tmp_path: Path) -> None:
    lengths = [6, 30, 9, 28]
    run = prepare_run(config(tmp_path, "auto", lengths), tmp_path / "auto")
    assert run.config.train.micro_batch == 1
    with pytest.raises(ConfigError) as caught:
        prepare_run(config(tmp_path, 2, lengths), tmp_path / "two")
    assert str(caught.value) == (
        f"train.micro_batch = 2: {CAUSE} train.micro_batch: 1 or data.sequence_length to at most 24"
    )
    run = prepare_run(config(tmp_path, 2, [6, 24, 9, 9], packing="none"), tmp_path / "short")
    assert run.config.train.micro_batch == 2


def test_pairs_on_both_sides_of_a_limit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pair = {"prompt": "two ", "chosen": "four" * 6, "rejected": "a"}
    path.write_text(f"{json.dumps(pair)}\n" * 4)
    pairs = config(tmp_path, 2, [6])
    data = {"objective": "dpo", "sources": [{"path": str(path), "format": "preference"}]}
    pairs = parse_config(
        {**pairs.model_dump(mode="json", exclude_unset=True)}
        | {"data": {"tokenizer": "byte", "sequence_length": 48, **data}}
    )
    with pytest.raises(ConfigError) as caught:
        prepare_run(pairs, tmp_path / "run")
    text = str(caught.value)
    assert text.startswith("data.objective = 'dpo': samples have ")
    assert text.endswith("; set data.sequence_length to at most 24")
