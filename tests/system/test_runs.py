"""Whole runs: interruption, resume, evaluation, export, bf16, cleanliness after random kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.system import conftest as H


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Final state of a run that nobody disturbs."""
    runner = H.Runner(tmp_path_factory.mktemp("straight"))
    try:
        state: dict[str, bytes] = H.state_bytes(runner.train(runner.configure("run", {})))
        return state
    finally:
        runner.stop_all()


@pytest.mark.timeout(300)
def test_interrupt_then_resume_gives_the_bytes_of_one_run(
    runner: Any, straight: dict[str, bytes]
) -> None:
    path = runner.configure("parts", {})
    run = runner.start(path)
    H.wait_for_step(run, 5)
    os.kill(run.process.pid, signal.SIGINT)
    code, output = run.wait(60)
    assert code == 130, output
    assert "resume" in output
    stopped_at = H.metrics(run.run_dir)[-1]["step"]
    assert 5 <= stopped_at < 20
    assert int(H.newest_state(run.run_dir).name.removeprefix("step-")) == stopped_at
    assert not H.segments_of(runner.root)
    run_dir = runner.train(path)
    assert [m["step"] for m in H.metrics(run_dir)] == list(range(1, 21))
    assert H.state_bytes(run_dir) == straight


@pytest.mark.timeout(300)
def test_killed_train_continues_from_memory(runner: Any, straight: dict[str, bytes]) -> None:
    path = runner.configure("killed", {})
    run = runner.start(path)
    H.wait_for_step(run, 5)
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait(30)
    deadline = time.monotonic() + 20
    while run.members() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not run.members(), "children outlived penstock train"
    assert not list((run.run_dir / "state").glob("step-*")), "nothing was saved before"
    run_dir = runner.train(path)
    assert [m["step"] for m in H.metrics(run_dir)] == list(range(1, 21))
    assert H.state_bytes(run_dir) == straight


@pytest.mark.timeout(300)
def test_evaluation_snapshot_and_scheme_change_on_resume(runner: Any) -> None:
    """From two routes to one: each block has half as many gradients, in memory laid out anew."""
    changes = {
        "train": {"steps": 6, "eval_every": 3, "save_every": 3, "eval_batches": 1},
        "schedule": {"scheme": "chimera"},
    }
    path = runner.configure("evaluated", changes)
    run_dir = runner.train(path)
    evaluated = H.metrics(run_dir, "eval")
    assert [m["step"] for m in evaluated] == [3, 6]
    assert all(m["loss"] > 0 and m["perplexity"] > 1 for m in evaluated)
    assert [p.name for p in sorted((run_dir / "state").iterdir())] == [
        "step-00000003",
        "step-00000006",
    ]
    arguments = [
        "--set",
        "train.steps=8",
        "--set",
        "schedule.scheme=spipe",
        "--set",
        "cluster.workers=1",
    ]
    runner.train(path, *arguments)
    assert [m["step"] for m in H.metrics(run_dir)] == list(range(1, 9))


@pytest.mark.timeout(300)
def test_fp16_weights_learn(runner: Any) -> None:
    """The loss scale starts too high and comes down by skips."""
    changes = {"model": {"dtype": "fp16"}, "optimizer": {"initial_loss_scale": 2.0**136}}
    lines = H.metrics(runner.train(runner.configure("half", changes)))
    commits = [m for m in lines if m["decision"] != "skip"]
    assert len(commits) < len(lines), "2^136 overflows"
    assert commits[-1]["loss"] < commits[0]["loss"] - 0.5


@pytest.mark.timeout(300)
def test_export_loads_in_transformers(runner: Any, tmp_path: Path) -> None:
    run_dir = runner.train(runner.configure("exported", {"train": {"steps": 3}}))
    out = tmp_path / "hf"
    command = [sys.executable, "-m", "penstock.client.main", "export", str(run_dir)]
    subprocess.run([*command, "--format", "hf", str(out)], check=True, timeout=120)
    check = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        "m = A.from_pretrained(sys.argv[1]);"
        "print(m(torch.tensor([[72, 101, 108]])).logits.isfinite().all().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, str(out)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "True", done.stderr
    check_training_from(runner, out)


def check_training_from(runner: Any, source: Path) -> None:
    """Train on from a Hugging Face directory with a block frozen: its bytes stay."""
    changes = {
        "model": {"hf": None, "path": str(source)},
        "train": {"steps": 3, "freeze": ["embed_tokens"]},
        "schedule": {"scheme": "mobius"},
    }
    run_dir = runner.train(runner.configure("again", changes))
    saved = load_file(H.newest_state(run_dir) / "block-0000.safetensors")
    given = load_file(next(source.glob("*.safetensors")))
    assert set(saved) == {"frozen.model.embed_tokens.weight"}
    np.testing.assert_array_equal(
        saved["frozen.model.embed_tokens.weight"], given["model.embed_tokens.weight"]
    )
    assert H.metrics(run_dir)[-1]["loss"] < H.metrics(run_dir)[0]["loss"]


KEPT = ("journal.sqlite", ".lock")
"""The journal with its log; lock files: removing one would break the lock."""


def dirty(run_dir: Path) -> list[str]:
    """Temporary files of a run that nobody would account for."""
    allowed = {"run.json", "resolved.yaml", "table.json", "plan.json", "metrics.jsonl"}
    return [
        p.name
        for p in run_dir.iterdir()
        if p.is_file() and p.name not in allowed and not p.name.startswith(KEPT)
    ]


def check_cleanliness(runner: Any, rounds: int, seed: int) -> None:
    """Runs in a row, half of them killed at random; nothing accumulates."""
    source = random.Random(seed)
    print(f"seed={seed}")
    for index in range(rounds):
        path = runner.configure(f"run{index % 3}", {"train": {"steps": 4 + index}})
        run = runner.start(path)
        if index % 2:
            time.sleep(source.uniform(0.5, 12.0))
            if run.process.poll() is None:
                os.kill(run.process.pid, signal.SIGKILL)
            run.wait(60)
            deadline = time.monotonic() + 20
            while run.members() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not run.members()
        else:
            code, output = run.wait(180)
            assert code == 0, f"round {index}: {output}\n{H.tail_logs(run.run_dir)}"
            assert not run.members()
            assert not dirty(run.run_dir)
    doctor = [sys.executable, "-m", "penstock.client.main", "doctor"]
    subprocess.run([*doctor, "--clean"], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert not H.segments_of(runner.root)
    report = subprocess.run([*doctor, "--json"], check=True, timeout=60, capture_output=True)
    ours = [f for f in json.loads(report.stdout)["findings"] if str(runner.root) in json.dumps(f)]
    assert not ours


@pytest.mark.timeout(400)
def test_a_run_and_a_killed_one_leave_nothing(runner: Any) -> None:
    check_cleanliness(runner, rounds=2, seed=random.SystemRandom().randrange(10**6))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_runs_in_a_row_leave_nothing(runner: Any) -> None:
    check_cleanliness(runner, rounds=20, seed=random.SystemRandom().randrange(10**6))
