"""A run whose directory, logs and output are on a disk that fills up: at the start, while it
trains, saves and ends. It ends with exit code 3 and one message, or goes on; no step is lost.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.host.errors import PenstockError
from penstock.protocol.wire.control import ControlClient
from tests.shelf import prepared
from tests.system.conftest import PLAIN, Runner, merge, segments_of, state_bytes
from tests.system.small_disk import SmallDisk, small_disk

DEADLINE_S = 600.0
LEFT_BYTES = 1_000_000
"""Bytes left on the disk: room for the journal of 40 steps, 21,000 bytes each, and not for a save.
A node's part of a state has 433,152 bytes, and leaves as many free.
"""


class RunOnDisk:
    """A training whose run directory and standard output are on a small disk."""

    def __init__(self, disk: SmallDisk, runner: Runner, changes: dict[str, Any]) -> None:
        self.disk = disk
        self.run_dir = disk.seen / "run"
        run = {"run": {"dir": str(disk.mount / "run")}}
        self._config = runner.configure("small", merge(changes, run))
        self._runner = runner
        self._out = disk.seen / "out.txt"

    def start(self, out: Path | None = None) -> subprocess.Popen[str]:
        """Start ``penstock train``; without ``out`` its output is on the disk, too."""
        self._out = out or self.disk.seen / "out.txt"
        with self._out.open("w") as file:
            process = subprocess.Popen(
                self.disk.command("train", str(self._config)),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._runner.started.append(process)
        return process

    def started(self) -> tuple[subprocess.Popen[str], ControlClient]:
        """Start it, and pause it before its first attempt."""
        process = self.start()
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                client = ControlClient.for_run(self.run_dir)
                client.pause()
            except PenstockError:
                time.sleep(0.05)
                continue
            while client.status().phase != "paused":
                assert time.monotonic() < deadline_s, client.status()
                time.sleep(0.05)
            return process, client
        raise AssertionError(f"not started: {self.said}")

    def ends(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Exit code, and what was said."""
        code = process.wait(timeout=DEADLINE_S)
        return code, self.said

    @property
    def said(self) -> str:
        """What its output has; a full disk may lack some."""
        return self._out.read_text()

    def steps(self) -> list[int]:
        """Committed steps by the metrics; every line must be whole."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def segments(self) -> list[str]:
        """Of the run, in /dev/shm."""
        return segments_of(self.disk.seen)


@pytest.mark.slow
def test_a_disk_that_fills_up_again_and_again(
    runner: Runner, tmp_path: Path, plain_run: Path
) -> None:
    """On two nodes, and in the end with the bytes of a run that nobody disturbed."""
    two = {"cluster": {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]}}
    changes = merge(merge(PLAIN, two), {"train": {"save_every": 10}})
    with small_disk(tmp_path / "disk", 24) as disk:
        prepared(plain_run, disk.seen / "run")
        run = RunOnDisk(disk, runner, changes)
        disk.fill()
        code, said = run.ends(run.start(out=tmp_path / "out.txt"))
        assert (code, said.count("\n")) == (3, 1)
        assert f"{disk.mount}/run/.lock: no space left on its disk: at least" in said
        assert " 0 are free" in said and not run.segments()

        disk.clear()
        process, client = run.started()
        disk.fill()
        with client:
            client.resume()
        code, _ = run.ends(process)
        assert code == 3
        console = (run.run_dir / "logs" / "console.txt").read_text()
        assert "Traceback" not in console
        complaints = [line for line in console.splitlines() if line.startswith("penstock: ")]
        assert len(complaints) == 1, console
        assert f"{disk.mount}/run/journal.sqlite: no space left on its disk" in complaints[0]
        assert complaints[0].endswith("the memory is kept")
        assert {name.split("-")[2] for name in run.segments()} == {"a", "b"}

        disk.clear()
        process, client = run.started()
        disk.fill(leave=LEFT_BYTES)
        with client:
            client.resume()
        code, said = run.ends(process)
        assert code == 3 and "penstock: saving step 40 failed: memoryd." in said
        assert "at least 8" in said and "its memory is kept" in said
        log = (run.run_dir / "logs" / "schedulerd.jsonl").read_text()
        for step in (10, 20, 30):
            assert f"saving step {step} failed" in log
        assert log.count("training goes on") == 3
        assert run.steps() == list(range(1, 41)) and run.segments()

        disk.clear()
        code, said = run.ends(run.start())
        assert code == 0, said
        assert run.steps() == list(range(1, 41)) and not run.segments()
        assert state_bytes(run.run_dir) == state_bytes(plain_run)
