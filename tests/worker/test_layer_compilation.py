"""The trial compilation of a prepared run computes on the run's own first micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.models.data.batch import MicroBatch
from penstock.workers.compiling import LayerCompilation, try_compiling
from penstock.workers.data import open_dataset
from tests.models.test_rows import chat, made, written


@pytest.mark.parametrize("loss_mean", ["tokens", "samples"])
def test_a_trial_takes_rows_of_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_mean: str
) -> None:
    """Layers are not compiled here, so that each computation of the trial takes a moment."""
    path = written(tmp_path, [chat("Hi", "abc" * n) for n in range(1, 9)])
    config = made(
        tmp_path,
        {"sources": [{"path": str(path)}], "sequence_length": 256},
        train={"global_batch": 2, "micro_batch": 2, "loss_mean": loss_mean},
        cluster={"workers": 1, "device": "cpu"},
    )
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    trials: list[LayerCompilation] = []
    monkeypatch.setattr(LayerCompilation, "run", run_and_list(trials, LayerCompilation.run))
    try_compiling(tmp_path)
    (trial,) = trials
    batch: MicroBatch = trial.batch
    (expected,) = open_dataset(tmp_path / "data", "train", config).read(0, 2, 2)
    assert batch.input_ids.tolist() == expected.input_ids.tolist()
    assert batch.document_ids is not None and batch.position_ids is not None
    assert (batch.label_weights is not None) == (loss_mean == "samples")


def run_and_list(trials: list[LayerCompilation], run: Any) -> Any:
    """A method that lists its object before it runs."""

    def listed(trial: LayerCompilation) -> None:
        trials.append(trial)
        run(trial)

    return listed
