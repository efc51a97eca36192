"""Named sets, the best saved state and the early end of whole runs, one of them killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system import conftest as H
from tests.system.test_inference import answer

TASKS = [
    {"prompt": f"{a} and {b} are ", "completion": str(a + b)} for a in range(9) for b in (3, 7)
]
VALUES = ("set", "step", "loss", "perplexity", "token_accuracy", "tokens")


def settings(folder: Path) -> dict[str, Any]:
    """A run with a rate so high that it is best at an early step; it ends at step 10."""
    text, tasks = folder / "held.py", folder / "tasks.jsonl"
    text.write_text("import abc\n\n\nclass Held(abc.ABC):\n    pass\n" * 9)
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return {
        "train": {
            "steps": 40,
            "save_every": 1,
            "keep_snapshots": 1,
            "keep_best": "tasks.perplexity",
            "stop_early": {"metric": "tasks.loss", "patience": 3},
        },
        "eval": {
            "sets": [
                {"name": "text", "path": str(text), "every": 4},
                {"name": "tasks", "path": str(tasks), "every": 2},
            ]
        },
        "optimizer": {"lr": 0.3, "min_lr": 0.3, "warmup_steps": 0, "schedule": "constant"},
    }


def evaluations(run_dir: Path) -> list[tuple[Any, ...]]:
    """The values of all evaluations, without what depends on time and attempts."""
    lines = H.metrics(run_dir, "eval")
    return list(dict.fromkeys(tuple(line[key] for key in VALUES) for line in lines))


def states(run_dir: Path) -> list[int]:
    """Steps of the saved states."""
    return sorted(int(path.name[5:]) for path in (run_dir / "state").glob("step-*"))


def ended(runner: H.Runner, run_dir: Path) -> str:
    """The reason of the run's end in its status."""
    code, output = runner.call("status", "--run-dir", run_dir)
    assert code == 0 and "has ended, done (" in output, output
    return output.split("has ended, done (")[1].split(") at step")[0]


def killed(run: H.TrainProcess, step: int) -> None:
    """Kills all processes of a run when an evaluation of ``step`` is in the metrics."""
    deadline_s = time.monotonic() + 500.0
    path = run.run_dir / "metrics.jsonl"
    while not (
        path.exists() and any(line["step"] >= step for line in H.metrics(run.run_dir, "eval"))
    ):
        assert time.monotonic() < deadline_s and run.process.poll() is None
        time.sleep(0.02)
    pids = run.members()
    os.killpg(run.process.pid, signal.SIGKILL)
    for pid in pids.values():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    run.process.wait(timeout=500)


@pytest.mark.slow
def test_a_killed_run_keeps_the_best_and_ends_as_an_undisturbed_one(runner: H.Runner) -> None:
    changes = settings(runner.root)
    config = runner.configure("plain", changes)
    run_dir = runner.train(config)
    lines = evaluations(run_dir)
    tasks = [line for line in lines if line[0] == "tasks"]
    last = tasks[-1][1]
    assert [line[1] for line in lines if line[0] == "text"] == list(range(4, last + 1, 4))
    assert [line[1] for line in tasks] == list(range(2, last + 1, 2)) and last < 40
    best = min(tasks, key=lambda line: line[2])[1]
    assert last == best + 6, "three evaluations later"
    assert states(run_dir) == [best, last], "retention keeps one, and the best"
    reason = ended(runner, run_dir)
    assert reason.startswith(f"stopped early at step {last} of 40: tasks.loss is best at step")

    result = answer(runner, "eval", run_dir, "--data", runner.root / "tasks.jsonl", "--step", best)
    of_best = dict(zip(VALUES, next(line for line in tasks if line[1] == best), strict=True))
    assert result["loss"] == pytest.approx(of_best["loss"], rel=1e-5)
    assert result["perplexity"] == pytest.approx(of_best["perplexity"], rel=1e-4)
    assert result["token_accuracy"] == of_best["token_accuracy"]
    assert result["counted_tokens"] == of_best["tokens"]

    config = runner.configure("killed", changes)
    for step in (2, best + 2):
        run = runner.start(config)
        killed(run, step)
    other = runner.train(config)
    assert evaluations(other) == lines
    assert (states(other), ended(runner, other)) == (states(run_dir), reason)
    for step in (best, last):
        pair = [
            sorted((d / f"state/step-{step:08d}").glob("*.safetensors")) for d in (run_dir, other)
        ]
        assert [p.read_bytes() for p in pair[0]] == [p.read_bytes() for p in pair[1]]
    code, output = runner.call("train", config)
    assert code == 0 and "stopped early at step" in output, "nothing to do"
    assert states(other) == [best, last]
