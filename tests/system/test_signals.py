"""Signals to whole runs, as schedulers of jobs and service managers send them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system import conftest as H
from tests.system.terminals import on_terminal

ENDLESS: dict[str, Any] = {"train": {"steps": 1_000_000, "clip_grad_norm": None}}
ONE_NODE: dict[str, Any] = {**ENDLESS}
TWO_NODES: dict[str, Any] = {
    **ENDLESS,
    "cluster": {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]},
}


def saved_step(run_dir: Path) -> int:
    return int(H.newest_state(run_dir).name.removeprefix("step-"))


TERM, WARNINGS = (signal.SIGTERM,), (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        pytest.param(ONE_NODE, TERM, id="one-node", marks=pytest.mark.slow),
        pytest.param(ONE_NODE, WARNINGS, id="warnings"),
        pytest.param(TWO_NODES, TERM, id="two-nodes"),
        pytest.param(TWO_NODES, WARNINGS, id="two-nodes-warnings", marks=pytest.mark.slow),
    ],
)
def test_signals_to_every_process_save_once_and_end(
    runner: Any, changes: dict[str, Any], numbers: tuple[signal.Signals, ...]
) -> None:
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
                os.kill(pid, source.choice(numbers))
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


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="TERM"),
        pytest.param(signal.SIGHUP, id="HUP", marks=pytest.mark.slow),
    ],
)
def test_an_end_of_a_job_that_has_passed_is_no_end(runner: Any, number: signal.Signals) -> None:
    """A job that was extended: its processes keep the old end."""
    past = {"SLURM_JOB_ID": "77", "SLURM_JOB_END_TIME": str(int(time.time()) - 3600)}
    run = runner.start(runner.configure("run", ONE_NODE), env=past)
    H.wait_for_step(run, 3)
    os.killpg(run.process.pid, number)  # as a terminal does that hangs up
    code, output = run.wait(500)
    assert code == 130 and "killing" not in output, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert saved_step(run.run_dir) == H.newest_step(run.run_dir) >= 3, "a step was lost"
    assert not run.members() and not H.segments_of(runner.root)


@pytest.mark.slow
def test_under_nohup_a_hangup_changes_nothing(runner: Any) -> None:
    path = runner.configure("run", {"train": {"steps": 300, "clip_grad_norm": None}})
    command = [sys.executable, "-m", "penstock.client.main", "train", str(path)]
    process = subprocess.Popen(
        ["env", "--ignore-signal=HUP", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    runner.started.append(process)
    run = H.TrainProcess(process, runner.root / "run")
    H.wait_for_step(run, 2)
    for pid in (*run.members().values(), process.pid):
        os.kill(pid, signal.SIGHUP)
    code, output = run.wait(500)
    assert code == 0 and saved_step(run.run_dir) == 300, output


@pytest.mark.parametrize(
    "words", [(), pytest.param(("2>&1", "|", "cat"), id="pipe", marks=pytest.mark.slow)]
)
def test_a_terminal_that_goes_away_stops_the_run(runner: Any, words: tuple[str, ...]) -> None:
    """The kernel sends SIGHUP to the session, and every write to the terminal fails."""
    path = runner.configure("run", ONE_NODE)
    run_dir = runner.root / "run"
    train = f"exec {sys.executable} -m penstock.client.main train {path} {' '.join(words)}"
    with on_terminal(["sh", "-c", train]) as terminal:
        members: dict[str, int] = {}

        def trains() -> bool:
            members.update(H.processes_of(run_dir, H.MEMBER_KINDS))
            return H.newest_step(run_dir) >= 3

        terminal.until(trains)
        terminal.hang_up()
        code = terminal.process.wait(timeout=500)
        assert words or code == 130, H.tail_logs(run_dir)
        deadline_s = time.monotonic() + 500.0
        while H.processes_of(run_dir, ("train", *H.MEMBER_KINDS)):
            assert time.monotonic() < deadline_s, H.tail_logs(run_dir)
            time.sleep(0.1)
    assert saved_step(run_dir) == H.newest_step(run_dir) >= 3, "a step was lost"
    assert members and not H.segments_of(runner.root)


@pytest.mark.parametrize(
    ("number", "until"),
    [
        pytest.param(signal.SIGHUP, "preparing the model", id="HUP"),
        pytest.param(signal.SIGUSR1, "preparing the model", id="USR1", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "training run", id="TERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, "training run", id="USR2"),
    ],
)
def test_a_signal_before_the_first_step_ends_the_start(
    runner: Any, number: signal.Signals, until: str
) -> None:
    path = runner.configure("run", {"model": {"hf": {"hidden_size": 48}}, **ONE_NODE})
    run = runner.start(path)
    assert run.process.stdout is not None
    lines = []
    for line in run.process.stdout:
        lines.append(line)
        if line.startswith(until):
            break
    for _ in range(3):
        os.killpg(run.process.pid, number)
    code, output = run.wait(500)
    assert code == 130, "".join(lines) + output
    assert "Traceback" not in output and "internal error" not in output, output
    assert not run.members() and not H.segments_of(runner.root)


def test_a_signal_during_imports_leaves_no_traceback() -> None:
    """At any moment: the time until the command runs is tried in pieces."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        words = (sys.executable, "-X", "importtime", "-m", "penstock.client.main", "train")
        process = subprocess.Popen(
            ["env", "--default-signal=INT", *words, "no-such.yaml"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.rstrip().endswith("click.core"):
                break
        process.send_signal(number)
        lines += process.communicate(timeout=500)[1].splitlines()
        assert process.returncode in (-number, 130), lines[-5:]
        assert not any("Traceback" in line for line in lines), lines
