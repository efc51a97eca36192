"""Processes that are stopped and never continued; nodes that come when the run has ended."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.host.errors import ExitCode, PenstockError
from penstock.host.process_identity import start_ticks
from penstock.protocol.wire.control import ControlClient
from tests.system import conftest as H
from tests.system.test_exactness import finish_exact

CHANGES = H.CLIPPED
NODES: dict[str, Any] = {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]}
TWO_NODES: dict[str, Any] = {**CHANGES, "cluster": {**CHANGES["cluster"], **NODES}}
WAIT_S = 600.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {WAIT_S:g} s until {what}"
        time.sleep(0.05)


def stop_for_ever(run: Any, name: str) -> None:
    """Stop a process; the run replaces it by itself, and goes on. Paused, since it may not end
    before that.
    """
    with ControlClient.for_run(run.run_dir) as client:
        client.pause()
    pid = run.members()[name]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: start_ticks(pid) is None, f"the stopped {name} is dead")
    wait_until(lambda: run.members().get(name, pid) != pid, f"{name} is replaced")
    wait_until(lambda: resumed(run.run_dir), "the scheduler answers")
    H.wait_for_step(run, H.newest_step(run.run_dir) + 1)


def resumed(run_dir: Path) -> bool:
    try:
        with ControlClient.for_run(run_dir) as client:
            client.resume()
    except PenstockError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "stopped"),
    [
        pytest.param(CHANGES, ("schedulerd", "node.a"), id="one-node"),
        pytest.param(TWO_NODES, ("schedulerd", "node.b", "node.a"), id="two-nodes"),
    ],
)
def test_stopped_for_ever_or_killed_by_mistake_costs_no_byte(
    runner: Any, clipped_run: Path, changes: dict[str, Any], stopped: tuple[str, ...]
) -> None:
    """schedulerd and nodes, which nobody but their parent watches; then living schedulerds die at
    random moments, recoveries included.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    source = random.Random(seed)
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 2)
    for name in stopped:
        stop_for_ever(run, name)
    for _ in range(4):
        time.sleep(source.uniform(0.0, 1.5))
        pid = run.members().get("schedulerd")
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    finish_exact(run, H.state_bytes(clipped_run))
    assert not run.members() and not H.segments_of(runner.root)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [{}, NODES], ids=["one-node", "two-nodes"])
@pytest.mark.parametrize("name", ["schedulerd", "node.a"])
def test_stopped_while_the_run_is_stopping(runner: Any, cluster: dict[str, Any], name: str) -> None:
    changes = {"train": {"steps": 1_000_000}, "cluster": {**CHANGES["cluster"], **cluster}}
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 5)
    pid = run.members()[name]
    os.kill(run.process.pid, signal.SIGTERM)
    os.kill(pid, signal.SIGSTOP)
    code, output = run.wait(500)
    assert code == 130, f"{output}\n{H.tail_logs(run.run_dir)}"
    saved = int(H.newest_state(run.run_dir).name.removeprefix("step-"))
    assert saved == H.newest_step(run.run_dir) >= 5
    assert not run.members() and not H.segments_of(runner.root)


@pytest.mark.parametrize(
    ("name", "wakes"),
    [
        pytest.param("node.b", False, id="node-never-wakes", marks=pytest.mark.slow),
        pytest.param("node.b", True, id="node-wakes-late", marks=pytest.mark.slow),
        pytest.param("memoryd.b", False, id="memoryd-never-wakes", marks=pytest.mark.slow),
        pytest.param("worker.1", False, id="worker-never-wakes", marks=pytest.mark.slow),
    ],
)
def test_stopped_when_the_run_ends(runner: Any, name: str, wakes: bool) -> None:
    """Whoever is stopped when the last step is saved: a finished run is a success, and leaves
    nothing.
    """
    timeout_s = 30.0 if wakes else 2.0
    changes = {
        "train": {"steps": 12},
        "cluster": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": timeout_s, **NODES},
    }
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 2)
    pid = run.members()[name]  # a run that has ended has none
    wait_until((run.run_dir / "state" / "step-00000012").is_dir, "the last step is saved")
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        pytest.skip("it had ended already")
    if wakes:
        wait_until(lambda: "node.a" not in run.members(), "the first node has ended")
        time.sleep(2.0)
        os.kill(pid, signal.SIGCONT)
    code, output = run.wait(500)
    assert code == 0, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert not run.members() and not H.segments_of(runner.root)


def by_hand(runner: Any, steps: int) -> tuple[Any, dict[str, subprocess.Popen[bytes]]]:
    """Two nodes started as a scheduler of jobs does, each by itself."""
    config = runner.configure("run", {"train": {"steps": steps}, "cluster": NODES})
    run_dir = runner.root / "run"
    command = [sys.executable, "-m", "penstock.client.main", "node", "--config", str(config)]
    nodes = {}
    for name in ("a", "b"):
        if name == "b":
            wait_until((run_dir / "endpoint.json").exists, "the first node is there")
        nodes[name] = subprocess.Popen([*command, "--node", name], start_new_session=True)
        runner.started.append(nodes[name])
    return H.TrainProcess(nodes["a"], run_dir), nodes  # type: ignore[arg-type]  # only its pid


@pytest.mark.slow
def test_a_node_by_hand_that_wakes_when_the_run_has_ended(runner: Any) -> None:
    """Nobody but the note in the run directory can tell it."""
    run, nodes = by_hand(runner, steps=12)
    H.wait_for_step(run, 12)
    os.kill(nodes["b"].pid, signal.SIGSTOP)
    assert nodes["a"].wait(timeout=500) == 0
    end = json.loads((run.run_dir / "ended.json").read_text())
    assert (end["code"], end["keep_memory"]) == (0, False)
    os.kill(nodes["b"].pid, signal.SIGCONT)
    assert nodes["b"].wait(timeout=500) == 0
    assert not run.members() and not H.segments_of(runner.root)


@pytest.mark.slow
def test_sigterms_to_every_process_of_nodes_by_hand(runner: Any) -> None:
    """As ``scancel`` sends them; neither node has a parent of the run."""
    run, nodes = by_hand(runner, steps=1_000_000)
    H.wait_for_step(run, 5)
    for _ in range(2):
        for pid in {*run.members().values(), *(node.pid for node in nodes.values())}:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue  # it has ended well
    assert [node.wait(timeout=500) for node in nodes.values()] == [ExitCode.STOPPED] * 2
    saved = int(H.newest_state(run.run_dir).name.removeprefix("step-"))
    assert saved == H.newest_step(run.run_dir) >= 5
    assert not run.members() and not H.segments_of(runner.root)
