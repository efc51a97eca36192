"""Each process killed or stopped at a random instant: the run ends with the same bytes.

The short version of :mod:`tests.system.test_soak`, and a kill between journal and broadcast.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.host.errors import ExitCode, PenstockError
from penstock.protocol.wire.control import ControlClient
from tests.system import conftest as H

HERE = Path(__file__).parent
KILL_VERSION = 2
CHANGES = H.CLIPPED
ENDLESS = H.merge(CHANGES, {"train": {"steps": 10**6}, "optimizer": H.ENDLESS["optimizer"]})
STEPS: int = CHANGES["train"]["steps"]


@pytest.fixture(scope="module")
def undisturbed(clipped_run: Path) -> dict[str, bytes]:
    """Final state of the run that nobody disturbs."""
    state: dict[str, bytes] = H.state_bytes(clipped_run)
    return state


def disturb(run: Any, target: str, kind: str, source: random.Random) -> None:
    """Kill a member at a random instant of the coming steps, or stop it until it is fenced. The run
    stands still while it is looked for: steps may be few.
    """
    pid, struck = None, False
    while not struck:
        obeyed(run, ControlClient.pause)
        pid = awaited(run, target, lambda found: found is not None)
        assert pid is not None
        obeyed(run, ControlClient.resume)
        time.sleep(source.random() * 0.1)
        with suppress(ProcessLookupError):  # it was dying of the case before
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            struck = True
    if kind == "stop":  # it is back soon after that, and the run's steps are few
        awaited(run, target, lambda found: found != pid)


def obeyed(run: Any, command: Callable[[ControlClient], Any]) -> None:
    """Have the scheduler do something, as soon as it is back."""
    deadline = time.monotonic() + 600.0
    while True:
        try:
            with ControlClient.for_run(run.run_dir) as client:
                command(client)
            return
        except PenstockError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def awaited(run: Any, target: str, fits: Callable[[int | None], bool]) -> int | None:
    """The pid of a member as soon as it fits."""
    deadline = time.monotonic() + 600.0
    while not fits(found := run.members().get(target)):
        assert time.monotonic() < deadline, f"{target} is {found}: {run.members()}"
        time.sleep(0.02)
    return found


def finish_exact(run: Any, undisturbed: dict[str, bytes]) -> None:
    """The run ends by itself, with each step exactly once and the undisturbed bytes."""
    code, output = run.wait(500)
    assert code == 0, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    assert_exact(run.run_dir, STEPS, undisturbed)


def assert_exact(run_dir: Path, steps: int, undisturbed: dict[str, bytes]) -> None:
    """A run has each step exactly once and the undisturbed bytes."""
    lines = H.metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), "each step exactly once"
    found = H.state_bytes(run_dir)
    different = [name for name in undisturbed if found.get(name) != undisturbed[name]]
    assert not different and found.keys() == undisturbed.keys(), f"bytes differ in {different}"


CASES = [
    ("worker.0", "kill"),
    ("worker.1", "kill"),
    ("optimizerd.a", "kill"),
    ("memoryd.a", "kill"),
    ("schedulerd", "kill"),
    ("worker.1", "stop"),
]


def test_every_process_is_disturbed_in_one_run(runner: Any) -> None:
    """All cases one after the other, in random order, each when the run has recovered; before them
    the scheduler dies between journal and broadcast: the next one must apply that commit once.

    The run is stopped after the last case, and compared with an undisturbed run of as many steps.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    source = random.Random(seed)
    marker = runner.root / "killed"
    run = runner.start(
        runner.configure("run", ENDLESS), env=killing_after_journal(runner.root, marker)
    )
    H.wait_for_step(run, KILL_VERSION)
    assert marker.exists(), "the scheduler was never killed between journal and broadcast"
    assert_a_second_scheduler_is_refused(run.run_dir)
    for target, kind in source.sample(CASES, len(CASES)):
        H.wait_for_step(run, H.newest_step(run.run_dir) + 1)
        disturb(run, target, kind, source)
    H.wait_for_step(run, H.newest_step(run.run_dir) + 1)
    obeyed(run, ControlClient.stop)
    code, output = run.wait(500)
    assert code == ExitCode.STOPPED, f"exit code {code}\n{output}\n{H.tail_logs(run.run_dir)}"
    steps = H.newest_step(run.run_dir)
    as_long = H.merge(ENDLESS, {"train": {"steps": steps}})
    undisturbed = H.state_bytes(runner.train(runner.configure("undisturbed", as_long)))
    assert_exact(run.run_dir, steps, undisturbed)
    assert_one_story_each(run.run_dir)


def assert_a_second_scheduler_is_refused(run_dir: Path) -> None:
    """It neither touches the run's files nor says a word to its members."""
    arguments = ["schedulerd", "--config", str(run_dir / "resolved.yaml"), "--port", "0"]
    with ControlClient.for_run(run_dir) as client:
        client.pause()  # steps are few
        second = subprocess.run(
            [sys.executable, "-m", "penstock.client.main", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        client.resume()
    assert second.returncode == 2, second.stderr
    assert "another scheduler of this run has it open" in second.stderr
    assert not (run_dir / "ended.json").exists()


def assert_one_story_each(run_dir: Path) -> None:
    """Every failure that the scheduler tells of has the same name in the logs of the processes that
    it was a failure for, which go on to other work without it.
    """
    logs: dict[str, list[dict[str, Any]]] = {}
    for name in ("schedulerd", "memoryd.a", "optimizerd.a", "worker.0", "worker.1", "node.a"):
        lines = (run_dir / "logs" / f"{name}.jsonl").read_text().splitlines()
        logs[name] = [json.loads(line) for line in lines]
    causes = {name: {line.get("cause", "") for line in found} for name, found in logs.items()}
    told = causes["schedulerd"] - {""}
    assert len(told) >= len(CASES), causes
    for name in ("memoryd.a", "optimizerd.a", "worker.0"):
        assert causes[name] - {""} <= told and len(causes[name] & told) >= 3, causes
        ended = [
            line for line in logs[name] if line["message"].startswith("drained for membership")
        ]
        assert all(line["cause"] in told for line in ended)
    assert causes["node.a"] & told, "it was ordered to fence somebody"


def killing_after_journal(root: Path, marker: Path) -> dict[str, str]:
    """Environment in which the scheduler dies once, when a commit has reached only the journal."""
    hook = root / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text((HERE / "kill_after_journal.py").read_text())
    return {
        "PYTHONPATH": os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]),
        "TEST_KILL_MARKER": str(marker),
        "TEST_KILL_VERSION": str(KILL_VERSION),
    }


@pytest.mark.slow
def test_workers_of_a_process_group_are_killed(runner: Any, undisturbed: dict[str, bytes]) -> None:
    """Gloo instead of messages: the leader of its rendezvous dies, and another member; the bytes
    are those of messages.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    source = random.Random(seed)
    changes = {**CHANGES, "cluster": {**CHANGES["cluster"], "transport": "gloo"}}
    run = runner.start(runner.configure("run", changes))
    for target in ("worker.0", "worker.1"):
        H.wait_for_step(run, H.newest_step(run.run_dir) + 2)
        disturb(run, target, "kill", source)
    finish_exact(run, undisturbed)
    logs = [(run.run_dir / "logs" / f"worker.{d}.jsonl").read_text() for d in range(2)]
    assert all("process group of 2 workers" in log for log in logs)
