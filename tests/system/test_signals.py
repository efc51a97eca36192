"""Signals to whole runs, as schedulers of jobs and service managers send them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system import conftest as H

ENDLESS: dict[str, Any] = {"train": {"steps": 1_000_000, "clip_grad_norm": None}}
ONE_NODE: dict[str, Any] = {**ENDLESS}
TWO_NODES: dict[str, Any] = {
    **ENDLESS,
    "cluster": {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]},
}


def saved_step(run_dir: Path) -> int:
    return int(H.newest_state(run_dir).name.removeprefix("step-"))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(ONE_NODE, id="one-node", marks=pytest.mark.slow),
        pytest.param(TWO_NODES, id="two-nodes"),
    ],
)
def test_sigterms_to_every_process_save_once_and_end(runner: Any, changes: dict[str, Any]) -> None:
    """In any order, several times: none of them may reach a process before its parent's order."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    source = random.Random(seed)
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 5)
    pids = [*run.members().values(), run.process.pid]
    for _ in range(3):
        for pid in source.sample(pids, len(pids)):
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue  # it has ended well
        time.sleep(0.3)
    code, output = run.wait(500)
    assert code == 130, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert output.count("stopping: ") == 1 and "killing" not in output
    assert "restarting" not in (run.run_dir / "logs" / "console.txt").read_text()
    assert saved_step(run.run_dir) == H.newest_step(run.run_dir) >= 5, "a step was lost"
    assert not run.members() and not H.segments_of(runner.root)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(ONE_NODE, id="one-node", marks=pytest.mark.slow),
        pytest.param(TWO_NODES, id="two-nodes", marks=pytest.mark.slow),
    ],
)
def test_without_time_to_save_the_memory_keeps_the_steps(
    runner: Any, changes: dict[str, Any]
) -> None:
    """A worker that does not answer: the attempt under way cannot end, so nothing can be saved."""
    path = runner.configure("run", changes)
    run = runner.start(path, "--grace-seconds", "8")
    H.wait_for_step(run, 5)
    os.kill(run.members()["worker.1"], signal.SIGSTOP)
    asked_s = time.monotonic()
    os.kill(run.process.pid, signal.SIGTERM)
    code, output = run.wait(500)
    took_s = time.monotonic() - asked_s
    reached = H.newest_step(run.run_dir)
    assert code == 130, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert f"steps 1 to {reached} are not saved" in output
    assert took_s < 16, "killed from outside would have been earlier"
    assert not run.members() and not list((run.run_dir / "state").glob("step-*"))
    assert H.segments_of(runner.root)
    runner.train(path, "--set", f"train.steps={reached + 3}")
    assert [m["step"] for m in H.metrics(run.run_dir)] == list(range(1, reached + 4))
