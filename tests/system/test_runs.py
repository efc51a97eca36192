"""Whole runs: interruption, resume, evaluation, export, bf16, cleanliness after random kills."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import penstock
from penstock.client.views.display import Plain
from penstock.protocol.run.rundir import RunDirectory
from tests.system import conftest as H

STEPS: int = H.PLAIN["train"]["steps"]


def test_interrupted_and_killed_runs_end_with_the_bytes_of_one_run(
    runner: Any, plain_run: Path
) -> None:
    """Saved by Ctrl-C and resumed from disk; killed, and resumed from memory; nothing is left. Each
    part settles its blocks in another way than the one before it, the undisturbed run advances.
    """

    def settling(way: str) -> Path:
        path: Path = runner.configure("parts", {**H.PLAIN, "optimizer": {"settle": way}})
        return path

    run = runner.start(settling("early"))
    H.wait_for_step(run, 5)
    os.kill(run.process.pid, signal.SIGINT)
    code, output = run.wait(500)
    assert code == 130, output
    assert "the same command resumes from there" in output
    stopped_at = H.metrics(run.run_dir)[-1]["step"]
    assert 5 <= stopped_at < STEPS
    assert int(H.newest_state(run.run_dir).name.removeprefix("step-")) == stopped_at
    assert not H.segments_of(runner.root)
    assert len(RunDirectory(run.run_dir).plan.settled_early) == 8
    run = runner.start(settling("advance"))
    H.wait_for_step(run, stopped_at + 1)
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait(500)
    wait_for_children(run)
    assert int(H.newest_state(run.run_dir).name.removeprefix("step-")) == stopped_at
    assert RunDirectory(run.run_dir).plan.settled_early == ()
    # What memory holds was decided with the old values; nothing takes it in with others.
    before = (run.run_dir / "resolved.yaml").read_bytes()
    refused = runner.start(settling("early"), "--set", "optimizer.weight_decay=0.3")
    code, output = refused.wait(60)
    assert (code, "optimizer.weight_decay: cannot change now" in output) == (2, True), output
    assert (run.run_dir / "resolved.yaml").read_bytes() == before
    run = runner.start(settling("early"))
    code, output = run.wait(500)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    assert not run.members() and not H.dirty(run.run_dir) and not findings(runner.root)
    assert [m["step"] for m in H.metrics(run.run_dir)] == list(range(1, STEPS + 1))
    assert H.state_bytes(run.run_dir) == H.state_bytes(plain_run)


def wait_for_children(run: Any) -> None:
    """A killed ``penstock train`` takes all processes with it."""
    deadline = time.monotonic() + 600.0
    while run.members() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not run.members(), "children outlived penstock train"


def test_a_python_function_gets_each_step_and_stops_the_run(runner: H.Runner) -> None:
    config = runner.configure("function", H.merge(H.PLAIN, H.ENDLESS))
    rows: list[dict[str, Any]] = []

    def on_step(row: dict[str, Any]) -> bool:
        rows.append(row)
        return int(row["step"]) >= 4

    result = penstock.train(config, on_step=on_step)
    assert result.exit_code == 5, result
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    last = result.metrics[-1]["step"]
    assert last >= 4 and H.newest_step(result.run_dir) == last, "what was done is saved"
    assert (result.summary.here, result.state and result.state.version) == (last, last)

    def failing(row: dict[str, Any]) -> None:
        raise ArithmeticError(f"step {row['step']}")

    with pytest.raises(ArithmeticError, match=f"step {last + 1}"):
        penstock.train(config, on_step=failing)
    reached = H.newest_step(result.run_dir)
    assert reached > last
    said = StringIO()
    resumed = penstock.train(
        config, on_step=lambda row: row["step"] > reached + 1, display=Plain(said)
    )
    lines = resumed.metrics[reached:]
    assert [row["step"] for row in lines] == list(range(reached + 1, resumed.summary.step + 1))
    assert resumed.summary.here == len(lines) and resumed.summary.step > reached
    rate = sum(row["tokens"] for row in lines) / sum(row["seconds"] for row in lines)
    assert resumed.summary.tokens_per_second == pytest.approx(rate)
    assert (
        f"{len(lines)} steps in " in said.getvalue()
        and f"at {rate:,.0f} tokens/s" in said.getvalue()
    )
    assert f"{lines[-1]['loss']:.4f} at step {lines[-1]['step']}; " in said.getvalue()


@pytest.mark.slow
def test_another_weight_decay_acts_from_the_next_step_on(runner: Any, plain_run: Path) -> None:
    """Beside the same step with the old one: moments and what does not decay are the same bytes,
    and the rest differs by that step's decay.
    """
    start, kept, changed = (
        H.arrays(plain_run),
        *(H.arrays(resumed_with(runner, plain_run, decay)) for decay in (0.1, 0.5)),
    )
    rate = H.metrics(runner.root / "decay-0.5")[-1]["lr"]
    decayed = {name for name in start if "." in name and start[name].ndim == 2}
    decayed = {name for name in decayed if not name.startswith("exp_avg")}
    assert decayed and len(decayed) < len(start) / 3
    for name, before in start.items():
        if name not in decayed:
            assert np.array_equal(kept[name], changed[name]), name
            continue
        expected = -rate * 0.4 * before.astype(np.float64)
        error = np.abs(changed[name].astype(np.float64) - kept[name] - expected)
        largest = np.maximum(np.abs(before), np.abs(changed[name]))
        assert np.all(error <= 2 * np.spacing(largest)), name


def resumed_with(runner: Any, finished: Path, decay: float) -> Path:
    """One step more than a finished run, with another weight decay."""
    run_dir: Path = runner.root / f"decay-{decay}"
    shutil.copytree(finished, run_dir)
    path = runner.configure(run_dir.name, H.merge(H.PLAIN, {"train": {"steps": STEPS + 1}}))
    run = runner.start(path, "--set", f"optimizer.weight_decay={decay}")
    code, output = run.wait(500)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run_dir)}"
    said = f"optimizer.weight_decay: 0.1 -> {decay} (from the next step on; earlier state"
    assert (said in output) == (decay != 0.1), output
    return run_dir


def test_evaluation_snapshot_and_scheme_change_on_resume(runner: Any) -> None:
    """From two routes to one: each block has half as many gradients, in memory laid out anew. The
    loss scale of fp16 weights starts too high and comes down by skips.
    """
    changes = {
        "model": {"dtype": "fp16"},
        "train": {"steps": 6, "eval_every": 3, "save_every": 3, "eval_batches": 1},
        "optimizer": {"initial_loss_scale": 2.0**136},
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
    lines = H.metrics(run_dir)
    commits = [m for m in lines if m["decision"] != "skip"]
    assert [m["step"] for m in commits] == list(range(1, 9))
    assert len(commits) < len(lines), "2^136 overflows"
    assert commits[-1]["loss"] < commits[0]["loss"] - 0.2


@pytest.mark.slow
def test_export_loads_in_transformers(runner: Any, plain_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    command = [sys.executable, "-m", "penstock.client.main", "export", str(plain_run)]
    subprocess.run([*command, "--format", "hf", str(out)], check=True, timeout=600)
    check = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A;"
        "m = A.from_pretrained(sys.argv[1]);"
        "print(m(torch.tensor([[72, 101, 108]])).logits.isfinite().all().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, str(out)], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip() == "True", done.stderr
    losses = check_training_from(runner, out)
    first, last = (H.metrics(plain_run)[i]["loss"] for i in (0, -1))
    assert max(losses) < (first + last) / 2, "training goes on where it ended"


def check_training_from(runner: Any, source: Path) -> list[float]:
    """Train on from a Hugging Face directory with a block frozen: its bytes stay."""
    changes = {
        "model": {"hf": None, "path": str(source)},
        "train": {"steps": 3, "freeze": ["embed_tokens"]},
        "schedule": {"scheme": "mobius"},
    }
    run_dir = runner.train(runner.configure("again", changes))
    assert load_file(H.newest_state(run_dir) / "block-0000.safetensors") == {}
    [base] = (run_dir / "state" / "base").iterdir()
    saved = load_file(base)
    given = load_file(next(source.glob("*.safetensors")))
    assert set(saved) == {"frozen.model.embed_tokens.weight"}
    np.testing.assert_array_equal(
        saved["frozen.model.embed_tokens.weight"], given["model.embed_tokens.weight"]
    )
    return [line["loss"] for line in H.metrics(run_dir)]


def findings(root: Path) -> list[dict[str, Any]]:
    """What ``penstock doctor`` finds of runs below a directory."""
    command = [sys.executable, "-m", "penstock.client.main", "doctor", "--json"]
    report = subprocess.run(command, check=True, timeout=600, capture_output=True)
    return [f for f in json.loads(report.stdout)["findings"] if str(root) in json.dumps(f)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_runs_in_a_row_half_of_them_killed_leave_nothing(runner: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    source = random.Random(seed)
    print(f"seed={seed}")
    for index in range(20):
        path = runner.configure(f"run{index % 3}", {"train": {"steps": 4 + index}})
        run = runner.start(path)
        if index % 2:
            time.sleep(source.uniform(0.5, 12.0))
            if run.process.poll() is None:
                os.kill(run.process.pid, signal.SIGKILL)
            run.wait(500)
            wait_for_children(run)
        else:
            code, output = run.wait(500)
            assert code == 0, f"round {index}: {output}\n{H.tail_logs(run.run_dir)}"
            assert not run.members()
            assert not H.dirty(run.run_dir)
    command = [sys.executable, "-m", "penstock.client.main", "doctor", "--clean"]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    assert not H.segments_of(runner.root)
    assert not findings(runner.root)
