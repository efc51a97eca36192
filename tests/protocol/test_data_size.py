"""The line about the training data at the start of a run, and steps of passes over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config.schema import Config, parse_config
from penstock.config.values import CHOSEN_LATER
from penstock.protocol.run.data_size import RowCounts, TrainingData, with_known_steps

ROWS = {"samples": 1200, "rows": 100, "length": 64, "tokens": 6336, "counted": 1584, "pad": 0}
TALLY = {"records": 1250, "truncated": 3, "split": 0, "dropped": 0, "skipped": 2, "empty": 0}


def test_the_line_of_rows_has_sizes_cuts_and_skips() -> None:
    counts = RowCounts.of({"rows": ROWS, "tally": TALLY})
    assert counts is not None
    data = TrainingData(tokens=6336, samples=100, counts=counts)
    assert data.in_steps(50, 4) == (
        "data: 1,250 records, 1,200 samples in 100 rows of 64 tokens, 1.0% padding; 6,336 tokens,"
        " 25.0% count; samples truncated: 3, records skipped: 2; 50 steps of 4 sequences are"
        " 2.00 epochs"
    )


def test_the_line_of_a_text_has_its_tokens() -> None:
    data = TrainingData(tokens=641, samples=10)
    assert data.in_steps(5, 4) == "data: 641 tokens; 5 steps of 4 sequences are 2.00 epochs"


@pytest.mark.parametrize(
    ("epochs", "rows", "global_batch", "steps"),
    [
        (1.0, 26, 4, 7),
        (1.0, 24, 4, 6),
        (2.0, 26, 4, 13),
        (0.5, 26, 4, 4),
        (0.1, 30, 1, 3),
        (0.7, 10, 1, 7),
        (1e-6, 26, 4, 1),
        (3.0, 2, 8, 1),
    ],
)
def test_steps_of_epochs_are_rounded_up(
    epochs: float, rows: int, global_batch: int, steps: int
) -> None:
    assert TrainingData(tokens=1, samples=rows).steps_of(epochs, global_batch) == steps


def test_a_run_with_epochs_knows_its_steps_once_its_rows_are_counted(tmp_path: Path) -> None:
    def config(**train: object) -> Config:
        model, data = {"hf": {"model_type": "llama"}}, {"path": "a.txt", "sequence_length": 8}
        return parse_config({"model": model, "data": data, "train": train})

    epochs = config(epochs=2, global_batch=4)
    assert with_known_steps(epochs, tmp_path).train.steps == CHOSEN_LATER
    (tmp_path / "data").mkdir()
    meta = tmp_path / "data" / "meta.json"
    meta.write_text(json.dumps({"train": {"num_tokens": 26 * 8 + 1}}))
    assert with_known_steps(epochs, tmp_path).train.steps == 13
    meta.write_text(json.dumps({"train": {"num_tokens": 999, "rows": ROWS, "tally": TALLY}}))
    assert with_known_steps(epochs, tmp_path).train.steps == 50, "packed rows are counted"
    steps = config(steps=9)
    assert with_known_steps(steps, tmp_path) is steps
