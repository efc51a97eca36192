"""Weights of records: columns, rows and micro-batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.host.errors import ConfigError, StateError
from penstock.models.data.batch import IGNORED_LABEL, weighted_by_sample
from penstock.workers.data import HeldOutData, micro_batches, open_dataset
from tests.models.test_rows import chat, made, opened, written

IDS = {"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, 6, -100, 8, 9, 10]}
RECORDS: list[dict[str, Any]] = [
    {**IDS, "weights": [9.0, 0.5, 9.0, -2.0, 0.0, 3.0]},
    {"text": "abc", "weight": 0.25},
    {**chat("Hi", "Yo"), "weight": 2},
    {**IDS, "weight": 4.0, "weights": [9.0, 0.5, 9.0, -2.0, 0.0, 3.0]},
    {**IDS, "weight": 3.0},
]
OF_LABELS = [
    [0.5, -2.0, 0.0, 3.0],
    [0.25, 0.25, 0.25],
    [2.0, 2.0, 2.0, 2.0],
    [2.0, -8.0, 0.0, 12.0],
    [3.0, 3.0, 3.0, 3.0],
]
"""Weights of the labels of each record, in order."""


@pytest.mark.parametrize("packing", ["none", "best-fit"])
def test_labels_have_the_weights_of_their_tokens(tmp_path: Path, packing: str) -> None:
    path = written(tmp_path, RECORDS)
    config = made(
        tmp_path / "run",
        {"path": str(path), "objective": "weighted", "packing": packing, "shuffle": False},
    )
    dataset = open_dataset(tmp_path / "run/data", "train", config)
    rows = dataset.num_sequences
    (batch,), _ = micro_batches(dataset, 0, rows, rows)
    assert batch.label_weights is not None and batch.label_weights.dtype == np.float32
    assert not batch.label_weights[batch.labels == IGNORED_LABEL].any()
    file, _ = opened(tmp_path / "run")
    numbers, samples = [], batch.samples
    for row in range(rows):
        begins = np.cumsum([0, *(length for _, _, length in file.places(row))])
        for (_, record, _), first in zip(file.places(row), begins, strict=False):
            numbers.append((record, int(samples[row, first])))
    for record, sample in numbers:
        counted = (samples == sample) & (batch.labels != IGNORED_LABEL)
        weights = batch.label_weights[counted].tolist()
        assert weights[: len(OF_LABELS[record])] == OF_LABELS[record], record


def test_a_sample_that_is_split_keeps_its_weights(tmp_path: Path) -> None:
    ids = list(range(1, 11))
    path = written(tmp_path, [{"input_ids": ids, "weights": [float(n) for n in ids]}])
    data = {"path": str(path), "objective": "weighted", "packing": "none", "shuffle": False}
    made(tmp_path / "run", {**data, "sequence_length": 4, "too_long": "split"})
    file, _ = opened(tmp_path / "run")
    assert [weights.tolist() for n in range(3) if (weights := file.weights(n)) is not None] == [
        [1.0, 2.0, 3.0, 4.0],
        [5.0, 6.0, 7.0, 8.0],
        [9.0, 10.0],
    ]


def test_means_of_samples_keep_the_weights(tmp_path: Path) -> None:
    path = written(tmp_path, RECORDS)
    data = {"path": str(path), "objective": "weighted", "packing": "none", "shuffle": False}
    config = made(tmp_path / "run", data)
    batches = open_dataset(tmp_path / "run/data", "train", config).read(0, 4, 2)
    plain = [dataclasses.replace(batch, label_weights=None) for batch in batches]
    for batch, alone, mean in zip(
        weighted_by_sample(batches), batches, weighted_by_sample(plain), strict=True
    ):
        assert alone.label_weights is not None and mean.label_weights is not None
        expected = mean.label_weights * alone.label_weights
        np.testing.assert_array_equal(batch.label_weights, expected)


def test_evaluations_are_plain(tmp_path: Path) -> None:
    """Held-out rows have weights in their file, and none in evaluations; a set needs none."""
    path = written(tmp_path, RECORDS * 3)
    other = written(tmp_path, [{"text": "plain"}], "other.jsonl")
    sets = [{"name": "end", "every": 1}, {"name": "other", "path": str(other), "every": 1}]
    config = made(
        tmp_path / "run",
        {"path": str(path), "objective": "weighted", "packing": "none", "eval_fraction": 0.2},
        eval={"sets": sets},
    )
    for each in config.evaluation_sets:
        held = HeldOutData.open(tmp_path / "run/data", each, config)
        batches, counted = held.batches(0)
        assert counted and all(batch.label_weights is None for batch in batches)


def test_a_changed_weight_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, RECORDS)
    data = {"path": str(path), "objective": "weighted", "cache_limit": 0}
    config = made(tmp_path / "run", data)
    file, _ = opened(tmp_path / "run")
    content = bytearray((tmp_path / "run/data/train.bin").read_bytes())
    content[file.layout.weights_at + 5] ^= 1
    (tmp_path / "run/data/train.bin").write_bytes(content)
    with pytest.raises(StateError, match="checksum differs"):
        open_dataset(tmp_path / "run/data", "train", config).read(0, 1, 1)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "a"}, "needs a value in the column weight"),
        ({"text": "a", "weights": [1.0]}, "goes with input_ids; give weight"),
        ({"text": "a", "weight": "2"}, "weight = '2': needs a number"),
        ({"text": "a", "weight": True}, "weight = True: needs a number"),
        ({"text": "a", "weight": float("nan")}, "needs a number from -1e"),
        ({**IDS, "weights": [1.0]}, "weights has 1 values for 6 ids"),
        ({**IDS, "weights": 1.0}, "needs a list of numbers"),
        ({**IDS, "weights": [1, 1, 1, 1, 1, None]}, r"weights\[5\] = None: needs a number"),
    ],
)
def test_records_that_cannot_be_weighted_are_refused(
    tmp_path: Path, record: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, [record])
    with pytest.raises(ConfigError, match=words):
        made(tmp_path / "run", {"path": str(path), "objective": "weighted"})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"path": "@stdlib"}, "reads columns of records, and @stdlib has none"),
        ({"path": None, "tokens": "a.bin"}, "and data.tokens has none"),
        ({"path": "a.jsonl", "packing": "wrapped"}, "wrapped makes one text of all records"),
    ],
)
def test_data_without_records_are_refused(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(tmp_path / "run", {**data, "objective": "weighted"})
