"""Whole runs on GPUs: training, and a worker that is killed in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.system import conftest as H

STEPS = 12

pytestmark = [
    pytest.mark.gpu,
    # Without asking torch, which takes seconds to import.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("scheme", "workers", "model"),
    [
        ("spipe", 1, {"dtype": "bf16"}),
        ("1f1b", 2, {"dtype": "bf16"}),
        ("mobius", 2, {"dtype": "fp16"}),
        ("1f1b", 1, {"dtype": "bf16", "compile": True}),
        ("zb-h1", 2, {"dtype": "bf16", "compile": True}),
    ],
)
def test_a_killed_worker_is_replaced(
    runner: Any, scheme: str, workers: int, model: dict[str, Any]
) -> None:
    changes = {
        "train": {"steps": STEPS},
        "model": model,
        "optimizer": {"lr": 5.0e-3, "grad_dtype": "bf16"},
        "schedule": {"scheme": scheme},
        "cluster": {"device": "cuda", "workers": workers},
        "observability": {"trace": True},
    }
    run = runner.start(runner.configure("gpu", changes))
    H.wait_for_step(run, 4, timeout_s=300)
    os.kill(run.members()["worker.0"], signal.SIGKILL)
    code, output = run.wait(300)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    committed = [line for line in H.metrics(run.run_dir) if line["decision"] != "skip"]
    assert [line["step"] for line in committed] == list(range(1, STEPS + 1)), "each exactly once"
    assert committed[-1]["loss"] < committed[0]["loss"] - 0.3
