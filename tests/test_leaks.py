"""The leak check knows a test's own segments from those of other runs on the machine."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shm.segment import Segment, list_segments, unlink
from tests.conftest import Made, segments

MAKE = """
import sys
from penstock.shm.segment import Segment
segment = Segment.create(sys.argv[1], 4096)
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    """An identity that no other run has; its segments are gone afterwards."""
    identity = secrets.token_hex(6)
    yield identity
    for name in list_segments(f"/penstock-{identity}-"):
        unlink(name)


def start(name: str) -> subprocess.Popen[bytes]:
    """A process of another run, which has made a segment, and lives until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"made\n"
    return process


def test_memory_of_a_run_elsewhere_is_no_leak(tmp_path: Path, run_id: str) -> None:
    """Neither while the other run lives, nor when a killed run has left memory behind."""
    made, before = Made(tmp_path, apart=False), segments()
    with made.watching(), start(f"/penstock-{run_id}-a-weights") as foreign:
        name = f"penstock-{run_id}-a-weights"
        assert name in segments() - before and name not in made.among(segments() - before)
        foreign.kill()
    assert name in segments() - before and name not in made.among(segments() - before)
    assert name in Made(tmp_path, apart=True).among(segments() - before)


def test_memory_of_this_process_of_a_fork_and_of_a_run_below_the_folder_is_ours(
    tmp_path: Path, run_id: str
) -> None:
    made, before = Made(tmp_path, apart=False), segments()
    with made.watching():
        Segment.create(f"/penstock-{run_id}-a-weights", 4096).close()
        if (pid := os.fork()) == 0:
            Segment.create(f"/penstock-{run_id}-a-grads", 4096)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    own = secrets.token_hex(6)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "run.json").write_text(json.dumps({"run_id": own}))
    with start(f"/penstock-{own}-a-state") as child:
        child.kill()
    try:
        ours = {f"penstock-{run_id}-a-{kind}" for kind in ("weights", "grads")}
        assert made.among(segments() - before) == ours | {f"penstock-{own}-a-state"}
    finally:
        unlink(f"/penstock-{own}-a-state")
