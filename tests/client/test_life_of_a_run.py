"""A real run from its start to its end: refused twins, killed supervisors, both ways of Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from penstock.host.process_identity import start_ticks
from penstock.shm.inventory import inventory
from penstock.shm.segment import unlink
from tests.system.conftest import sockets_of

START_TIMEOUT_S = 600.0

CONFIG = {
    "model": {
        "hf": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        }
    },
    "data": {"sequence_length": 16},
    "train": {"steps": 1_000_000, "global_batch": 2},
    "schedule": {"scheme": "1f1b"},
    "cluster": {"workers": 1, "threads_per_worker": 1},
}


class Run:
    """One run directory and the trainings started in it."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "run"
        text = root / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 500)
        fields = {**CONFIG, "data": {"path": str(text), "sequence_length": 16}}
        self.config = root / "config.yaml"
        self.config.write_text(yaml.safe_dump(fields))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start ``penstock train``; ``output``: where it writes."""
        command = [sys.executable, "-m", "penstock.client.main", "train", str(self.config)]
        process = subprocess.Popen(
            [*command, "--run-dir", str(self.directory)],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def call(self, *arguments: str) -> tuple[int, str]:
        """Any other command on the run, to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "penstock.client.main", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout + done.stderr

    def step(self) -> int:
        """The last step in the metrics."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def wait_past(self, step: int, process: subprocess.Popen[str]) -> None:
        """Until a step beyond ``step`` is committed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.step() <= step:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"no step after {step} in {START_TIMEOUT_S} s"
            time.sleep(0.02)

    def pids(self) -> dict[str, int]:
        """Member -> pid, from the logs of the supervisor that runs now."""
        endpoint = json.loads((self.directory / "endpoint.json").read_text())
        found = {"node.a": int(endpoint["pid"])}
        for line in (self.directory / "logs" / "node.a.jsonl").read_text().splitlines():
            entry = json.loads(line)
            if entry["message"].startswith("started "):
                found[entry["message"].removeprefix("started ")] = entry["child_pid"]
        return found

    def segments(self) -> list[str]:
        """Names of the run's segments."""
        if not (self.directory / "run.json").exists():
            return []
        run_id = json.loads((self.directory / "run.json").read_text())["run_id"]
        return [name for entry in inventory() if entry.run_id == run_id for name in entry.names]

    def close(self) -> None:
        """Nothing of it stays."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=600)
        deadline = time.monotonic() + 600.0
        pids = self.pids().values() if (self.directory / "endpoint.json").exists() else ()
        while any(start_ticks(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name in self.segments():
            unlink(name)
        for folder in sockets_of(self.directory.parent):
            shutil.rmtree(folder)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    instance = Run(tmp_path)
    yield instance
    instance.close()


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Yields the writing end of a full pipe that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


def wait_dead(pids: list[int]) -> None:
    """Until none of the processes is alive."""
    deadline = time.monotonic() + 600.0
    while alive := [pid for pid in pids if start_ticks(pid) is not None]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.01)


def test_life_of_a_run(run: Run) -> None:
    training = run.start()
    run.wait_past(2, training)

    code, said = run.call("train", str(run.config), "--run-dir", str(run.directory))
    assert code == 2 and f"in use by process {training.pid}" in said

    before = run.pids()
    os.kill(before["node.a"], signal.SIGKILL)
    wait_dead(list(before.values()))
    run.wait_past(run.step() + 2, training)
    assert run.pids()["node.a"] != before["node.a"]

    code, said = run.call("status", "--run-dir", str(run.directory), "--json")
    status = json.loads(said)
    assert (code, status["phase"] in ("running", "deciding", "amending")) == (0, True)
    members = {m["member"]: m for m in status["members"]}
    assert members.keys() >= {"schedulerd", "node.a", "memoryd.a", "worker.0"}
    with urllib.request.urlopen(status["metrics"]["a"], timeout=600) as page:
        text = page.read().decode()
    for name in members:
        assert f'process="{name}"' in text
    code, said = run.call("doctor", "--run-dir", str(run.directory))
    assert code == 0 and "may go" not in said.partition("segments: ")[2].partition("\n")[0]

    # Twice Ctrl-C: killed, the memory stays, nothing is saved.
    training.send_signal(signal.SIGINT)
    time.sleep(0.1)
    training.send_signal(signal.SIGINT)
    output, _ = training.communicate(timeout=600)
    assert training.returncode == 130, output
    assert "the same command resumes from" in output

    # Stopped by command: saved, and nothing is left.
    reached = run.step()
    training = run.start()
    run.wait_past(reached, training)
    code, said = run.call("stop", "--run-dir", str(run.directory))
    assert code == 0, said
    output, _ = training.communicate(timeout=600)
    assert training.returncode == 5, "a chain of jobs must not take it for finished: " + output
    assert "stopped at step" in output
    assert run.segments() == []
    assert not (run.directory / "endpoint.json").exists()
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps)), "a step was counted twice"

    last = f"train.steps={steps[-1]}"
    code, said = run.call("train", str(run.config), "--run-dir", str(run.directory), "--set", last)
    assert code == 0 and "are done and saved" in said


def test_output_that_nobody_reads_stops_neither_supervision_nor_ctrl_c(
    run: Run, full_pipe: int
) -> None:
    process = run.start(full_pipe)
    run.wait_past(0, process)
    before = run.pids()
    os.kill(before["node.a"], signal.SIGKILL)
    deadline = time.monotonic() + START_TIMEOUT_S
    while run.pids()["node.a"] == before["node.a"]:
        assert time.monotonic() < deadline, "the node is not replaced"
        time.sleep(0.02)
    run.wait_past(run.step(), process)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=600) == 130
    assert run.segments() == []


KILLS_AT_THE_END = (
    "import os, signal, sys\n"
    "if 'penstock.client.launch' in sys.orig_argv and 'node' in sys.orig_argv:\n"
    "    import penstock.daemons.node.main as main\n"
    "    def end(*arguments):\n"
    "        os.kill(os.getppid(), signal.SIGKILL)\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    main._retract = end\n"
)
"""A sitecustomize: the node kills ``train`` and itself when its children have ended."""


def test_the_same_command_cleans_after_a_kill_behind_the_last_step(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(KILLS_AT_THE_END)
    settings = ("--set", "train.steps=2", "--set", "cluster.preload=false")
    words = ["train", str(run.config), "--run-dir", str(run.directory), *settings]
    killed = subprocess.run(
        [sys.executable, "-m", "penstock.client.main", *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (run.directory / "endpoint.json").exists() and run.step() == 2
    assert sockets_of(run.directory.parent)
    code, text = run.call(*words)
    assert code == 0 and "all 2 steps are done and saved" in text, text
    assert not (run.directory / "endpoint.json").exists()
    assert not sockets_of(run.directory.parent)


def test_a_killed_command_leaves_no_folder_behind_the_next(run: Run, tmp_path: Path) -> None:
    """A real kill ends the preparation of ``penstock data`` in the middle."""
    place = tmp_path / "temporary"
    place.mkdir()
    command = [sys.executable, "-m", "penstock.client.main", "data", str(run.config)]
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not [*place.glob("penstock-data.*/resolved.yaml")]:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    assert len([*place.glob("penstock*")]) == 1
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    assert not [*place.glob("penstock*")]
