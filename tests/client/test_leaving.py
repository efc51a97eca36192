"""What a node's unit does before it is stopped: leave the run if the machine goes down."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import leaving
from penstock.host.errors import CapacityError
from penstock.protocol.generated import scheduler_pb2 as pb


class Scheduler:
    """Stands for the client of a scheduler that saves, or cannot."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.saves = 0

    def for_run(self, run_dir: Path) -> Scheduler:
        return self

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def snapshot(self) -> pb.SnapshotReply:
        self.saves += 1
        if self.error is not None:
            raise self.error
        return pb.SnapshotReply(directory="step-00000003", version=3)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that systemd names as the service's main one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv("MAINPID", str(process.pid))
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("said", "error", "saves", "dies"),
    [
        ("running", None, 0, False),
        ("stopping", CapacityError("the disk is full"), 1, False),
        ("stopping", None, 1, True),
    ],
    ids=["systemctl stop", "shutdown that cannot save", "shutdown"],
)
def test_only_a_machine_that_goes_down_with_the_state_saved_leaves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: subprocess.Popen[bytes],
    said: str,
    error: Exception | None,
    saves: int,
    dies: bool,
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho {said}\nexit 1\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    scheduler = Scheduler(error)
    monkeypatch.setattr(leaving, "ControlClient", scheduler)
    assert leaving.main([str(tmp_path)]) == (3 if error else 0)
    assert scheduler.saves == saves
    if dies:
        assert node.wait(timeout=600) == -9
    else:
        assert node.poll() is None


def test_what_cannot_be_told_counts_as_a_machine_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not leaving.going_down()
