"""``optimizer.rollback: arithmetic``: runs train as exact ones do, to rounding errors."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.system import conftest as H

STEPS = 60
"""So many that a run lasts until its optimizerd is killed."""
CHANGES: dict[str, Any] = {
    "train": {"steps": STEPS, "clip_grad_norm": 0.5},
    "model": {"hf": {"tie_word_embeddings": True, "num_hidden_layers": 2}},
    "optimizer": {"speculate": "always"},
    "cluster": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 2.0},
}


ONE_NODE: dict[str, Any] = {}
TWO_NODES = {"cluster": {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "victim"),
    [
        pytest.param(ONE_NODE, "optimizerd.a", id="one-node"),
        pytest.param(TWO_NODES, "optimizerd.b", id="two-nodes"),
    ],
)
def test_clipped_steps_and_a_killed_optimizerd_cost_bits_and_no_more(
    runner: Any, changes: dict[str, Any], victim: str
) -> None:
    """On two nodes tied weights have gradients of both: the owner pulls the other node's."""
    changes = H.merge(CHANGES, changes)
    exact = H.metrics(runner.train(runner.configure("exact", changes)))
    in_place = H.merge(changes, {"optimizer": {"rollback": "arithmetic"}})
    run = runner.start(runner.configure("arithmetic", in_place))
    H.wait_for_step(run, 3)
    os.kill(run.members()[victim], signal.SIGKILL)
    code, output = run.wait(500)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    assert "optimizer.rollback: arithmetic is not exact" in output
    found = H.metrics(run.run_dir)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1)), "each step exactly once"
    decisions = [line["decision"] for line in found]
    assert decisions == [line["decision"] for line in exact] and "amend" in decisions
    losses, wanted = ([line["loss"] for line in lines] for lines in (found, exact))
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert losses[-1] < losses[0] - 0.1
