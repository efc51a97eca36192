"""Runs with split masters, 16 bytes a parameter: kills leave no trace in their bytes."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from tests.system import conftest as H

STEPS = 12
CHANGES: dict[str, Any] = {
    "train": {"steps": STEPS, "clip_grad_norm": 2.7},
    "model": {"dtype": "bf16", "hf": {"tie_word_embeddings": True, "num_hidden_layers": 3}},
    "optimizer": {"master": "split", "settle": "early", "grad_dtype": "bf16"},
    "schedule": {"scheme": "spipe"},
    "cluster": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 2.0},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_optimizerds_and_workers_leave_no_trace(runner: Any) -> None:
    """Gradients have one copy, so workers wait for settles, and recovery finds them whole."""
    undisturbed = runner.train(runner.configure("undisturbed", CHANGES))
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    source = random.Random(seed)
    run = runner.start(runner.configure("killed", CHANGES))
    for target in ("optimizerd.a", "worker.1", "optimizerd.a"):
        H.wait_for_step(run, H.newest_step(run.run_dir) + 1)
        time.sleep(source.random() * 0.1)
        os.kill(run.members()[target], signal.SIGKILL)
    code, output = run.wait(240)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    steps = [line["step"] for line in H.metrics(run.run_dir)]
    assert steps == list(range(1, STEPS + 1)), "each step exactly once"
    assert H.state_bytes(run.run_dir) == H.state_bytes(undisturbed)
    whole = {"optimizer": {"grad_dtype": "bf16"}, "train": {**CHANGES["train"], "steps": STEPS + 1}}
    resumed = runner.train(runner.configure("undisturbed", {**CHANGES, **whole}))
    assert [line["step"] for line in H.metrics(resumed)] == list(range(1, STEPS + 2))
