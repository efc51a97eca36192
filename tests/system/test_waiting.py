"""Real processes: what is speculated ends with the bytes of a run that waits for every decision."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.system import conftest as H

STEPS = 200


@pytest.mark.slow
def test_200_steps_of_fp16_from_a_loss_scale_of_2_to_32(runner: Any) -> None:
    ends = []
    for speculate in ("auto", "never"):
        changes = {
            "train": {"steps": STEPS, "clip_grad_norm": 1.0},
            "model": {"dtype": "fp16"},
            "optimizer": {
                "grad_dtype": "fp16",
                "initial_loss_scale": 2.0**32,
                "loss_scale_growth_interval": 50,
                "speculate": speculate,
            },
        }
        run_dir = runner.train(runner.configure(speculate, changes))
        lines = H.metrics(run_dir)
        scales = [line["loss_scale"] for line in lines]
        first = next(i for i, line in enumerate(lines) if line["decision"] != "skip")
        assert first > 10, "gradients above 2^-6 overflow at 2^22"
        assert scales[: first + 1] == [2.0 ** (32 - n) for n in range(first + 1)]
        counts = Counter(line["decision"] for line in lines)
        assert counts["commit"] + counts["amend"] == STEPS
        assert counts["amend"] > 0
        assert counts["skip"] >= first
        ends.append((H.state_bytes(run_dir), [line["loss"] for line in lines]))
    assert ends[0] == ends[1]
