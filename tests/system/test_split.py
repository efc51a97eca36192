"""Runs with split masters, 16 bytes a parameter; faults in them are in ``test_soak.py``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system import conftest as H

STEPS = 12
CHANGES: dict[str, Any] = {
    "train": {"steps": STEPS, "clip_grad_norm": 2.7},
    "model": {"dtype": "bf16", "hf": {"tie_word_embeddings": True, "num_hidden_layers": 3}},
    "optimizer": {"master": "split", "settle": "early", "grad_dtype": "bf16"},
    "schedule": {"scheme": "spipe"},
}


@pytest.mark.slow
def test_a_resume_stores_masters_whole(runner: Any) -> None:
    runner.train(runner.configure("run", CHANGES))
    whole = {"optimizer": {"grad_dtype": "bf16"}, "train": {**CHANGES["train"], "steps": STEPS + 1}}
    resumed = runner.train(runner.configure("run", {**CHANGES, **whole}))
    assert [line["step"] for line in H.metrics(resumed)] == list(range(1, STEPS + 2))
