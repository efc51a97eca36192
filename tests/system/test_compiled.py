"""A run whose layers are compiled and whose backward is split, with a worker that is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from penstock.protocol.wire.control import ControlClient
from tests.system import conftest as H

STEPS = 60


def changes(scheme: str) -> dict[str, Any]:
    """A run of two workers; both schemes keep all graphs."""
    return {
        "train": {"steps": STEPS},
        "model": {"dtype": "bf16", "compile": True},
        "schedule": {"scheme": scheme, "recompute": "none"},
        "cluster": {"workers": 2},
    }


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {"r": 4, "alpha": 16, "dropout": 0.1}])
def test_a_killed_worker_of_a_split_run_leaves_the_bytes_of_a_whole_one(
    runner: Any, adapter: dict[str, Any] | None
) -> None:
    one, other = ({**changes(scheme), "adapter": adapter} for scheme in ("1f1b", "zb-h1"))
    whole = runner.train(runner.configure("whole", one), timeout_s=1200.0)
    run = runner.start(runner.configure("split", other))
    H.wait_for_step(run, 2, timeout_s=1200.0)
    with ControlClient.for_run(run.run_dir) as client:
        client.pause()  # steps are few
        pid = run.members()["worker.1"]
        client.resume()
    os.kill(pid, signal.SIGKILL)
    code, output = run.wait(1200)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    assert [line["step"] for line in H.metrics(run.run_dir)] == list(range(1, STEPS + 1))
    assert "layers as they are" not in output
    found, wanted = H.state_bytes(run.run_dir), H.state_bytes(whole)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
