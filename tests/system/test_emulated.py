"""Runs on emulated devices: how long steps take, and what is left of them after a kill."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.client.views.trace.comparison import TraceOutputs, make_trace_report
from penstock.planner.cost.emulation import Emulation
from penstock.planner.memory.footprint import device_peaks
from penstock.planner.simulate import simulate
from penstock.planner.traces.measured import measure
from penstock.planner.traces.traced import TracedRun
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace_reading import read_traces
from tests.forked import Forking
from tests.shelf import Shelf
from tests.system import conftest as H

STEPS = 6
TIME_SCALE = 2.0

CHANGES: dict[str, Any] = {
    "model": {"hf": None, "dtype": "fp16"},
    "data": {"sequence_length": 256},
    "train": {"steps": STEPS, "global_batch": 16},
    "optimizer": {"grad_dtype": "bf16"},
    "cluster": {
        "workers": 4,
        "device": "emulated:analytic:V100-32:gpt3-1.3b",
        "heartbeat_interval_s": 0.2,
        "heartbeat_timeout_s": 4.0,
    },
    "emulation": {"scale": "1/1000", "time_scale": TIME_SCALE},
    "observability": {"trace": True},
}


TWO_NODES = {
    "cluster": {**CHANGES["cluster"], "workers": 2, "nodes": [{"name": "a"}, {"name": "b"}]},
    # Block servers of this machine answer in up to 50 ms: little beside longer steps.
    "emulation": {**CHANGES["emulation"], "time_scale": 4 * TIME_SCALE},
}


def configure(
    runner: Any, name: str, changes: dict[str, Any] | None = None, **schedule: Any
) -> Path:
    path: Path = runner.configure(name, {**CHANGES, **(changes or {}), "schedule": schedule})
    return path


@pytest.fixture(scope="module")
def emulated_run(tmp_path_factory: pytest.TempPathFactory, shelf: Shelf, forking: Forking) -> Any:
    """Run directory of 1F1B that nobody disturbs."""
    runner = H.Runner(tmp_path_factory.mktemp("emulated"), shelf, forking)
    yield runner.train(configure(runner, "run", scheme="1f1b"))
    runner.stop_all()


def measured_over_simulated(run_dir: Path) -> float:
    """Median step (the first previews only) over the simulator's, of the same plan and costs."""
    run = RunDirectory(run_dir)
    emulation = Emulation.of(run.config)
    step_s = statistics.median(line["seconds"] for line in H.metrics(run_dir)[1:])
    simulation = simulate(run.plan, emulation.costs, emulation.cluster, stops_early=True)
    return float(step_s / emulation.time_scale / simulation.makespan_s)


def test_steps_take_no_less_than_simulated_and_are_called_emulated(
    emulated_run: Path,
) -> None:
    lines = H.metrics(emulated_run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["emulated"] is True for line in lines)
    assert {line["decision"] for line in lines} == {"commit"}
    assert 0.9 < measured_over_simulated(emulated_run), "a busy machine only takes longer"
    run = RunDirectory(emulated_run)
    assert 0 < len(run.plan.settled_early) < run.plan.num_blocks, "auto tells blocks apart"
    planned = max(p.total_bytes for p in device_peaks(run.plan, Emulation.of(run.config).costs))
    for line in lines:
        assert line["peak_device_bytes"] == pytest.approx(planned, rel=0.05)


def test_a_trace_is_in_the_seconds_of_the_cluster(emulated_run: Path) -> None:
    """And beside what the costs of the emulation lead to."""
    report = make_trace_report(emulated_run, None, None, TraceOutputs())
    assert report.costs == "analytic:V100-32:gpt3-1.3b"
    run = RunDirectory(emulated_run)
    emulation = Emulation.of(run.config)
    simulated = simulate(run.plan, emulation.costs, emulation.cluster, stops_early=True)
    assert report.simulation.makespan_s == pytest.approx(simulated.makespan_s)
    here = measure(TracedRun.of(read_traces(emulated_run), ("a",)), run.plan, copies=True)
    seconds = {attempt.number: attempt.makespan_s for attempt in here.attempts}
    for attempt in report.chosen:
        assert attempt.makespan_s * TIME_SCALE == pytest.approx(seconds[attempt.number])
    assert all(abs(device.error) < 0.05 for device in report.memory)


@pytest.mark.slow
def test_steps_and_traces_take_as_long_as_simulated(emulated_run: Path) -> None:
    assert 0.9 < measured_over_simulated(emulated_run) < 1.15
    report = make_trace_report(emulated_run, None, None, TraceOutputs())
    assert abs(report.error) < 0.05


@pytest.mark.slow
def test_another_schedule_and_a_killed_worker_leave_the_same_bytes(
    runner: Any, emulated_run: Path
) -> None:
    """Gradients follow from the weights and tensors that an instruction saw: if one were of
    another version or micro-batch, the bytes would differ.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    run = runner.start(configure(runner, "run", scheme="spipe"))
    H.wait_for_step(run, 2)
    time.sleep(random.Random(seed).random() * TIME_SCALE * 0.4)
    os.kill(run.members()["worker.2"], signal.SIGKILL)
    code, output = run.wait(500)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    assert H.metrics(run.run_dir)[-1]["epoch"] > 1, "the run has recovered from the kill"
    assert H.state_bytes(run.run_dir) == H.state_bytes(emulated_run)
    assert 0.9 < measured_over_simulated(run.run_dir) < 1.15


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param({"scheme": "zb-h1"}, id="split backward"),
        pytest.param({"scheme": "bpipe"}, id="swaps to peers"),
        pytest.param({"scheme": "mobius", "recompute": "none"}, id="weights bound anew"),
        pytest.param({"scheme": "megatron-offload"}, id="recomputation"),
    ],
)
def test_every_kind_of_instruction_leaves_the_same_bytes(
    runner: Any, emulated_run: Path, schedule: dict[str, Any]
) -> None:
    run_dir = runner.train(configure(runner, "run", **schedule))
    assert H.state_bytes(run_dir) == H.state_bytes(emulated_run)
    assert 0.9 < measured_over_simulated(run_dir) < 1.15


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"scheme": "spipe"}, {"scheme": "chimera"}])
def test_nodes_read_from_each_other(
    runner: Any, emulated_run: Path, schedule: dict[str, Any]
) -> None:
    """Weights with spipe, gradients with chimera; both routes' gradients round apart."""
    run_dir = runner.train(configure(runner, "run", TWO_NODES, **schedule))
    if schedule["scheme"] == "spipe":
        assert H.state_bytes(run_dir) == H.state_bytes(emulated_run)
    assert 0.9 < measured_over_simulated(run_dir) < 1.15
