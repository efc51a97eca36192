"""What a start leaves that failed or had nothing to do, and what commands say of it afterwards."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.system import conftest as H


def tree(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    """Time of the last change and bytes of every file."""
    return {
        str(path.relative_to(run_dir)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(run_dir.rglob("*"))
        if path.is_file()
    }


def test_a_finished_run_is_left_alone_and_tells_its_end(runner: Any) -> None:
    config = runner.configure("run", {"train": {"steps": 2, "clip_grad_norm": None}})
    run_dir = runner.train(config)
    before = tree(run_dir)
    starts: list[tuple[int, list[str | Path]]] = [
        (0, ["train", config]),
        (0, ["train", config, "--set", "optimizer.lr=0.5", "--set", "train.steps=1"]),
        (0, ["node", "--config", config, "--set", "train.steps=2"]),
        (2, ["train", config, "--set", "train.steps=9", "--set", "cluster.device=cuda"]),
        (2, ["train", config, "--set", "train.steps=9", "--set", "data.sequence_length=16"]),
        (3, ["train", config, "--set", "train.steps=9", "--set", "memory.host_limit=1M"]),
    ]
    for expected, words in starts:
        code, output = runner.call(*words)
        assert code == expected, (words, output)
        assert expected or "steps are done and saved" in output, (words, output)
        after = tree(run_dir)
        assert {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} == set()

    saved = run_dir / "state" / "step-00000002"
    for command, expected in (("status", 0), ("watch", 0), ("stop", 0), ("pause", 2)):
        code, output = runner.call(command, "--run-dir", run_dir)
        assert code == expected and "has ended, done at step 2/2; saved: step 2" in output, output
        assert command not in ("status", "watch") or f"saved state  {saved}" in output, output
    status = json.loads(runner.call("status", "--run-dir", run_dir, "--json")[1])
    assert (status["phase"], status["version"], status["last_metrics"]["step"]) == ("done", 2, 2)
    code, output = runner.call("trace", run_dir)
    assert code == 2 and "one of 50 (observability.sample_every)" in output, output
    assert "observability.trace=true" in output
    assert tree(run_dir) == before


def test_a_start_that_trained_nothing_leaves_no_memory(runner: Any) -> None:
    changes = {
        "model": {"hf": {"rms_norm_eps": -1000.0}},
        "train": {"steps": 5, "max_skips": 1, "clip_grad_norm": None},
    }
    run = runner.start(runner.configure("run", changes))
    code, output = run.wait(500)
    assert code == 4 and "failed at step 0" in output, output
    assert not H.segments_of(runner.root), output
    assert "memory" not in output.partition("failed at step 0")[2], output


@pytest.mark.slow
def test_a_failure_names_the_steps_that_only_the_memory_has(runner: Any) -> None:
    changes = {"train": {"steps": 10**6, "clip_grad_norm": None}, "cluster": {"max_restarts": 0}}
    config = runner.configure("run", changes)
    run = runner.start(config)
    H.wait_for_step(run, 3)
    os.kill(run.members()["worker.0"], signal.SIGKILL)
    code, output = run.wait(500)
    last = H.newest_step(run.run_dir)
    assert code == 4 and H.segments_of(runner.root), output
    assert f"steps 1 to {last}, not saved" in output
    assert f"penstock doctor --clean --force {run.run_dir}" in output
    assert f"steps 1 to {last}, not saved" in runner.call("status", "--run-dir", run.run_dir)[1]
    runner.train(config, "--set", f"train.steps={last + 1}", "--set", "cluster.max_restarts=2")
    assert [line["step"] for line in H.metrics(run.run_dir)] == list(range(1, last + 2))


@pytest.mark.slow
def test_a_node_prints_its_steps(runner: Any) -> None:
    config = runner.configure("run", {"train": {"steps": 3, "clip_grad_norm": None}})
    code, output = runner.call("node", "--config", config, "--set", "train.steps=2")
    run_dir = runner.root / "run"
    assert code == 0 and H.newest_step(run_dir) == 2, output
    assert f"penstock watch {run_dir}" in output and "step 2 of 2, loss" in output
    code, output = runner.call(
        "node", "--config", run_dir / "resolved.yaml", "--set", "train.steps=5"
    )
    assert code == 2 and "--set train.steps=5" in output, output
