"""What the processes of a real run count, held against what the run says of itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.host.errors import ExitCode
from penstock.protocol.run.rundir import RunDirectory
from tests.pages import page_of
from tests.system import conftest as H

STEPS = 4000
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def samples_of(run_dir: Path, member: str) -> Samples:
    """By name, then labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(page_of(RunDirectory(run_dir).run_id, member)):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def control(verb: str, run_dir: Path) -> None:
    command = [sys.executable, "-m", "penstock.client.main", verb, "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)


def accounted(samples: Samples) -> float:
    names = ("penstock_device_busy_seconds_total", "penstock_device_idle_seconds_total")
    return sum(sum(samples[name].values()) for name in names)


def start(runner: Any) -> H.TrainProcess:
    """A run of more steps than there is time for."""
    changes = {
        "train": {"steps": STEPS, "save_every": 5, "keep_snapshots": 2},
        "model": {"dtype": "bf16"},
        "optimizer": {"grad_dtype": "bf16"},
    }
    run: H.TrainProcess = runner.start(runner.configure("counted", changes))
    H.wait_for_step(run, 7)
    return run


def pause(run: H.TrainProcess) -> None:
    """Pause; returns once both workers and the scheduler show the pause on their pages. They look
    once a second, and a wait that is under way shows after a second.
    """
    control("pause", run.run_dir)
    idle = "penstock_device_idle_seconds_total"
    cause = (("cause", "scheduler"),)
    before = {m: samples_of(run.run_dir, m)[idle][cause] for m in ("worker.0", "worker.1")}
    deadline_s = time.monotonic() + 600.0
    while any(samples_of(run.run_dir, m)[idle][cause] < s + 1.0 for m, s in before.items()):
        assert time.monotonic() < deadline_s, "the workers do not wait for the scheduler"
        time.sleep(0.1)
    while samples_of(run.run_dir, "schedulerd")["penstock_step"][()] != H.newest_step(run.run_dir):
        assert time.monotonic() < deadline_s, "the scheduler does not show its step"
        time.sleep(0.1)


def test_a_real_run_counts_what_its_lines_say(runner: Any) -> None:
    begun_s = time.time()
    run = start(runner)
    pause(run)
    lines = H.metrics(run.run_dir)
    scheduler = samples_of(run.run_dir, "schedulerd")
    last = lines[-1]
    gauges = {"loss": "loss", "gradient_norm": "grad_norm", "learning_rate": "lr", "step": "step"}
    assert {key: scheduler[f"penstock_{key}"][()] for key in gauges} == {
        key: last[field] for key, field in gauges.items()
    }
    decisions = scheduler["penstock_attempts_total"]
    assert sum(decisions.values()) == len(lines)
    for decision in ("commit", "amend"):
        expected = sum(line["decision"] == decision for line in lines)
        assert decisions[("decision", decision),] == expected
    sums = {"tokens_total": "tokens", "optimizer_tail_seconds_total": "optimizer_tail_seconds"}
    for key, field in {**sums, "attempt_seconds_sum": "seconds"}.items():
        expected = sum(line[field] for line in lines)
        assert scheduler[f"penstock_{key}"][()] == pytest.approx(expected), key
    assert scheduler["penstock_last_commit_timestamp_seconds"][()] == last["time"]
    assert begun_s < last["time"] < time.time() + 1.0
    assert scheduler["penstock_data_position_samples"][()] == 8 * len(lines)
    samples = scheduler["penstock_data_samples"][()]
    passes = [8 * (number + 1) / samples for number in range(len(lines))]
    assert [line["data_epoch"] for line in lines] == passes
    assert scheduler["penstock_saves_total"][("outcome", "done"),] == last["step"] // 5
    assert scheduler["penstock_commit_latency_seconds_count"][()] == len(lines)
    check_workers(run.run_dir, len(lines), lines)
    check_optimizer(run.run_dir)
    control("stop", run.run_dir)
    assert run.wait(500)[0] == ExitCode.STOPPED


@pytest.mark.slow
def test_every_second_of_a_device_is_accounted_for(runner: Any) -> None:
    """In steps and in a pause."""
    run = start(runner)
    pause(run)
    before, begun_s = samples_of(run.run_dir, "worker.0"), time.monotonic()
    step = H.newest_step(run.run_dir)
    control("resume", run.run_dir)
    H.wait_for_step(run, step + 15)
    pause(run)
    after, ended_s = samples_of(run.run_dir, "worker.0"), time.monotonic()
    wall_s = ended_s - begun_s
    assert accounted(after) - accounted(before) == pytest.approx(wall_s, rel=0.02)
    busy = "penstock_device_busy_seconds_total"
    assert sum(after[busy].values()) > sum(before[busy].values())
    control("stop", run.run_dir)
    assert run.wait(500)[0] == ExitCode.STOPPED


def check_workers(run_dir: Path, attempts: int, lines: list[dict[str, Any]]) -> None:
    """Work is that of the plan."""
    first = samples_of(run_dir, "worker.0")
    waits = first["penstock_device_idle_seconds_total"]
    assert waits[("cause", "scheduler"),] >= 1.0, "paused"
    tokens = 8 * 32
    blocks = RunDirectory(run_dir).table.blocks
    expected = 3 * tokens * attempts * sum(block.forward_flops for block in blocks)
    workers = [first, samples_of(run_dir, "worker.1")]
    flops = sum(w["penstock_device_model_flops_total"][()] for w in workers)
    assert flops == pytest.approx(expected)
    busy_s = sum(sum(w["penstock_device_busy_seconds_total"].values()) for w in workers)
    told_s = sum(2 * max(line["seconds"], 0) * (1 - line["bubble_ratio"]) for line in lines)
    assert 0 < busy_s <= told_s * 1.02
    moved = first["penstock_transfer_bytes_total"]
    for kind in ("weights", "gradients"):  # 16 bits, widened and rounded
        direction = "h2d" if kind == "weights" else "d2h"
        assert moved[("direction", direction), ("kind", kind)] > 0
    sent = moved[("direction", "send"), ("kind", "activations")]
    received = workers[1]["penstock_transfer_bytes_total"]
    assert sent == received[("direction", "receive"), ("kind", "activations")]


def check_optimizer(run_dir: Path) -> None:
    samples = samples_of(run_dir, "optimizerd.a")
    assert samples["penstock_optimizer_cores"][()] == 2
    assert samples["penstock_sweep_bytes_total"][("pass", "advance"),] > 0
    assert 0 < samples["penstock_optimizer_busy_seconds_total"][()]
    assert 0 < samples["penstock_optimizer_cpu_seconds_total"][()]
    assert samples["penstock_optimizer_wait_seconds_total"][("cause", "idle"),] > 0.5
