"""Runs on packed conversations are stopped and killed at random steps. They go on with the same
samples: with the losses of other micro-batches, or with the bytes of the same plan.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.system import conftest as H

MICRO_BATCHES = (1, 2, 4, 8)
TOLERANCE = 1e-5
"""Relative; another order of samples changes losses by more than a hundred times as much."""


def settings(folder: Path) -> dict[str, Any]:
    """Keys of a run on conversations of many lengths."""
    random, path = Random(35), folder / "chats.jsonl"
    with path.open("w") as file:
        for number in range(90):
            roles = ("user", "assistant") * random.randint(1, 2)
            texts = [chr(97 + number % 26) * random.randint(1, 40) for _ in roles]
            turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")
    keys = {"packing": "best-fit", "chat_template": "chatml", "sequence_length": 256}
    return {
        "data": {"path": str(path), "tokenizer": "byte", **keys},
        "train": {"steps": 2, "global_batch": 8, "micro_batch": 2},
        # A step must not depend on the number of steps.
        "optimizer": {"schedule": "constant", "warmup_steps": 0, "min_lr": 0.0, "lr": 1e-3},
    }


def cut(runner: H.Runner, path: Path, random: Random, micro_batch: int) -> int:
    """Trains one to four steps more, and stops the run or kills it; returns its last step."""
    run_dir = runner.root / path.stem
    target = H.newest_step(run_dir) + random.randint(1, 4)
    size = ("--set", f"train.micro_batch={micro_batch}")
    if random.random() < 0.5:
        runner.train(path, "--set", f"train.steps={target}", *size)
        assert H.newest_step(run_dir) == target
        return target
    run = runner.start(path, "--set", "train.steps=1000000", *size)
    H.wait_for_step(run, target)
    os.kill(run.process.pid, signal.SIGKILL if random.random() < 0.5 else signal.SIGINT)
    run.wait(500.0)
    return H.newest_step(run_dir)


@pytest.mark.parametrize(
    ("same_plan", "resumes"),
    [
        (True, 1),
        (False, 1),
        pytest.param(True, 9, marks=pytest.mark.slow),
        pytest.param(False, 9, marks=pytest.mark.slow),
    ],
)
def test_resumed_runs_take_the_samples_of_one_run(
    runner: H.Runner, same_plan: bool, resumes: int
) -> None:
    changes, random = settings(runner.root), Random(resumes + 10 * same_plan)
    path = runner.configure("cut", changes)
    sizes = [2 if same_plan else random.choice(MICRO_BATCHES) for _ in range(resumes)]
    for size in sizes:
        cut(runner, path, random, size)
    steps = H.newest_step(runner.root / "cut") + 2
    last = ("--set", f"train.steps={steps}", "--set", f"train.micro_batch={2 if same_plan else 4}")
    resumed = runner.train(path, *last)
    whole = runner.train(
        runner.configure("whole", H.merge(changes, {"train": {"steps": steps}})),
    )
    losses = [[line["loss"] for line in H.metrics(each)] for each in (resumed, whole)]
    assert len(losses[0]) == len(losses[1]) == steps
    assert max(abs(a / b - 1) for a, b in zip(*losses, strict=True)) <= TOLERANCE
    if same_plan:
        assert losses[0] == losses[1]
        assert H.state_bytes(resumed) == H.state_bytes(whole)
