"""Runs under a real Slurm with two or three nodes, by the script of ``penstock deploy slurm``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.host.errors import PenstockError
from penstock.protocol.wire.control import ControlClient
from tests.integration.slurmbed import HANG_S, SlurmBed, missing
from tests.shelf import Shelf
from tests.system import conftest as H

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no Slurm here: {missing()}")


@pytest.fixture(scope="module")
def bed() -> Iterator[SlurmBed]:
    """A Slurm of three nodes."""
    slurm = SlurmBed(nodes=("pn1", "pn2", "pn3"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def runner(bed: SlurmBed, tmp_path: Path, shelf: Shelf) -> Iterator[H.Runner]:
    """Runs below a folder; no job, and none of their memory, is left when a test has passed."""
    yield H.Runner(tmp_path, shelf)
    bed.clear()
    leaked = H.segments_of(tmp_path)
    for name in leaked:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
    assert not leaked


class Job:
    """A run, and the job that trains it."""

    def __init__(self, bed: SlurmBed, runner: H.Runner, changes: dict[str, Any]) -> None:
        cluster = {"workers": 1, "heartbeat_timeout_s": HANG_S}
        base = {"cluster": cluster, "optimizer": {"threads": 1}}
        self.bed = bed
        self.config = runner.configure("run", H.merge(base, changes))
        self.run_dir = runner.root / "run"
        self.number = ""

    def submit(self, *options: str, time: str = "600", lead: int = 60, nodes: int = 2) -> None:
        """Writes the script as a user does, and submits it."""
        script = self.config.with_suffix(".sbatch")
        script.unlink(missing_ok=True)
        words = f"deploy slurm --nodes {nodes} --time {time} --lead {lead}".split()
        command = [sys.executable, "-m", "penstock.client.main", *words]
        command += ["--config", str(self.config), "--out", str(script)]
        subprocess.run(command, cwd=self.run_dir.parent, check=True, capture_output=True)
        self.number = self.bed.submit(script, *options)

    def said(self) -> str:
        """What the script and its steps printed."""
        path = self.run_dir.parent / f"run-{self.number}.txt"
        return path.read_text() if path.exists() else "nothing"

    def wait_for_step(self, step: int, timeout_s: float = HANG_S) -> None:
        """Waits until a step is committed."""
        self.wait_until(lambda: H.newest_step(self.run_dir) >= step, f"step {step}", timeout_s)

    def wait_until(
        self, condition: Callable[[], bool], what: str, timeout_s: float = HANG_S
    ) -> None:
        """Waits, and fails with what the job said."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            in_time = time.monotonic() < deadline_s
            assert in_time, f"not in {timeout_s} s: {what}\n{self.said()}\n{self.bed.logs()}"
            time.sleep(0.1)

    def end(self, *states: str, timeout_s: float = HANG_S) -> None:
        """Waits for the job's end."""
        self.wait_until(
            lambda: self.bed.state(self.number) in states, f"job is {states}", timeout_s
        )

    def pause(self) -> int:
        """Pauses the run, however busy the scheduler is; returns the step it is at."""
        self.wait_until(lambda: asked(self.run_dir, ControlClient.pause), "it pauses")
        return H.newest_step(self.run_dir)

    def resume(self) -> None:
        self.wait_until(lambda: asked(self.run_dir, ControlClient.resume), "it goes on")

    def members(self) -> dict[str, int]:
        """Pids of the run's processes by name."""
        return H.TrainProcess(None, self.run_dir).members()  # type: ignore[arg-type]  # not needed

    def nodes(self) -> dict[str, int]:
        """Pids of ``penstock node`` by the Slurm node that it runs on."""
        found = {}
        for pid in self.bed.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"node" in words and str(self.config).encode() in words and b"-c" not in words:
                values = dict(word.split(b"=", 1) for word in environment if b"=" in word)
                found[values[b"SLURMD_NODENAME"].decode()] = pid
        return found

    def saved(self) -> int:
        """The newest saved step."""
        return int(H.newest_state(self.run_dir).name.removeprefix("step-"))


def asked(run_dir: Path, call: Callable[[ControlClient], str]) -> bool:
    try:
        with ControlClient.for_run(run_dir) as client:
            call(client)
    except PenstockError:
        return False
    return True


def test_a_job_of_two_nodes_trains(bed: SlurmBed, runner: H.Runner) -> None:
    job = Job(bed, runner, {"train": {"steps": 6}})
    job.submit()
    job.end("COMPLETED", "FAILED", "CANCELLED")
    assert bed.state(job.number) == "COMPLETED", job.said()
    assert (job.saved(), bed.field(job.number, "ExitCode")) == (6, "0:0")
    said = job.said()
    for rank in (0, 1):
        assert f"Slurm job {job.number}: SLURM_NODEID={rank}, so this is node node-{rank}" in said
    cluster = yaml.safe_load((job.run_dir / "resolved.yaml").read_text())["cluster"]
    assert [node["name"] for node in cluster["nodes"]] == ["node-0", "node-1"]
    assert cluster["scheduler_port"] >= 20_000
    assert not job.members()


@pytest.mark.integration
def test_killed_nodes_and_steps_cost_no_byte(bed: SlurmBed, runner: H.Runner) -> None:
    """A killed node is started again, then a killed step; memory has all steps."""
    job = Job(bed, runner, H.ENDLESS)
    job.submit()
    job.wait_for_step(2)
    step = job.pause()
    victim = job.nodes()["pn2"]
    os.kill(victim, signal.SIGKILL)
    print(f"killed penstock node {victim} on pn2 at step {step}")
    job.wait_until(lambda: job.nodes().get("pn2", victim) != victim, "pn2 has a node again")
    job.resume()
    job.wait_for_step(step + 1)
    step = job.pause()
    print(f"scancel --signal=KILL {job.number}.0 at step {step}")
    bed.ask("scancel", "--signal=KILL", f"{job.number}.0")
    job.wait_for_step(step + 2)
    job.wait_until(lambda: asked(job.run_dir, ControlClient.stop), "it is stopped")
    job.end("COMPLETED", "FAILED", "CANCELLED")
    said = job.said()
    assert bed.field(job.number, "ExitCode") == "5:0", said
    assert "on pn2 was killed by signal 9; it is started again" in said
    assert "it is started again, and goes on from what is in memory" in said
    assert not any("restored" in line for line in said.splitlines())
    alone = runner.configure("alone", H.endless_until(job.saved()))
    assert H.state_bytes(job.run_dir) == H.state_bytes(runner.train(alone))


@pytest.mark.integration
def test_the_time_limit_then_other_hosts_then_scancel(bed: SlurmBed, runner: H.Runner) -> None:
    job = Job(bed, runner, {"train": {"steps": 1_000_000}})
    job.submit(lead=110)
    job.wait_for_step(2)
    # It took as long as it took to begin. More than the lead must be left: Slurm looks every half
    # minute, and must see less than the lead, but not the end of the time.
    hours, minutes, _ = map(int, bed.field(job.number, "RunTime").split(":"))
    limit = f"TimeLimit={60 * hours + minutes + 3}"
    bed.ask("scontrol", "update", f"JobId={job.number}", limit)
    assert bed.field(job.number, "NodeList") == "pn[1-2]"
    job.wait_until(lambda: int(bed.field(job.number, "Restarts")) == 1, "it is queued anew")
    first = job.saved()
    print(f"job {job.number} saved step {first} before its time limit, and queued itself anew")
    assert first > 2 and "it is queued anew, and goes on from what is saved" in job.said()
    bed.wait_for_state(job.number, "PENDING")
    assert not H.segments_of(runner.root) and not job.members()
    # Slurm lets requeued jobs wait two minutes. pn1 is said to be broken. In the second in which it
    # was queued anew the job's credentials are those that have been revoked.
    bed.ask(
        "scontrol",
        "update",
        f"JobId={job.number}",
        "ExcNodeList=pn1",
        "StartTime=now+3",
        "TimeLimit=600",
    )
    job.wait_for_step(first + 5)
    assert bed.field(job.number, "NodeList") == "pn[2-3]"
    print(f"it went on from step {first} on pn[2-3]; scancel {job.number}")
    steps = [entry["step"] for entry in H.metrics(job.run_dir)]
    assert steps == list(range(1, len(steps) + 1)), "no step was repeated or left out"
    bed.ask("scancel", job.number)
    bed.wait_for_state(job.number, "CANCELLED")
    job.wait_until(lambda: not job.members(), "all have ended")
    end = json.loads((job.run_dir / "ended.json").read_text())
    assert (end["keep_memory"], end["failed"]) == (False, False)
    assert job.saved() == H.newest_step(job.run_dir) > first
