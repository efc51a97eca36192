"""The doctor finds what is there, and removes only what belongs to nobody alive."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client.doctor import Finding, clean, examine
from penstock.daemons.node.lock import RunLock, train_lock_path
from penstock.shm.control import ControlView, control_bytes
from penstock.shm.segment import Segment, exists, unlink

DEAD_OWNER = """
import sys
from penstock.shm.control import ControlView, control_bytes
from penstock.shm.segment import Segment
segment = Segment.create(sys.argv[1], control_bytes(2, 64))
view = ControlView.initialize(
    segment.buffer, run_id=sys.argv[2], digest=bytes(32), num_blocks=2, undo_bytes=64
)
view.set_incarnation(1)
view.set_committed(17)
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    """An identity nobody else has; its segments are gone afterwards."""
    identity = secrets.token_hex(6)
    yield identity
    for kind in ("control", "weights"):
        unlink(f"/penstock-{identity}-a-{kind}")


def findings(run_id: str, run_dir: Path | None = None) -> list[Finding]:
    """What concerns one run (other runs may be active on this machine)."""
    return [f for f in examine(run_dir).findings if run_id in f.name]


def make_dead(run_id: str) -> str:
    """A control segment whose owner has ended."""
    name = f"/penstock-{run_id}-a-control"
    subprocess.run([sys.executable, "-c", DEAD_OWNER, name, run_id], check=True, timeout=30)
    return name


def test_dead_memory_is_described_and_removed(run_id: str, tmp_path: Path) -> None:
    name = make_dead(run_id)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": run_id, "format": 1}))
    (tmp_path / "state" / "step-00000012").mkdir(parents=True)
    [finding] = findings(run_id, tmp_path)
    assert finding.removable
    assert "holds step 17; saved on disk: step 12" in finding.detail
    report = examine(tmp_path)
    only_ours = type(report)(machine=report.machine, findings=(finding,))
    cleaned = clean(only_ours, tmp_path)
    assert not exists(name)
    assert [text for text in cleaned.removed if "holds step 17" in text]


def test_living_memory_is_left_alone(run_id: str) -> None:
    segment = Segment.create(f"/penstock-{run_id}-a-control", control_bytes(2, 64))
    ControlView.initialize(
        segment.buffer, run_id=run_id, digest=bytes(32), num_blocks=2, undo_bytes=64
    )
    try:
        [finding] = findings(run_id)
        assert not finding.removable
        assert f"owner pid {os.getpid()} alive" in finding.detail
    finally:
        segment.close()


def test_memory_without_control_segment_was_cut_short(run_id: str) -> None:
    segment = Segment.create(f"/penstock-{run_id}-a-weights", 4096)
    segment.close()
    [finding] = findings(run_id)
    assert (finding.removable, "cut short" in finding.detail) == (True, True)


def test_run_directory_leftovers(tmp_path: Path) -> None:
    half = tmp_path / "state" / ".tmp-step-00000003"
    half.mkdir(parents=True)
    (half / "block-0000.safetensors").write_text("half")
    endpoint = tmp_path / "endpoint.json"
    endpoint.write_text("{}")
    ours = (str(half), str(endpoint))
    with RunLock.acquire(train_lock_path(tmp_path), wait_s=0.0):
        held = [f for f in examine(tmp_path).findings if f.name in ours]
        assert [f.removable for f in held] == [False, False]
    report = examine(tmp_path)
    loose = tuple(f for f in report.findings if f.name in ours)
    assert [f.removable for f in loose] == [True, True]
    clean(type(report)(machine=report.machine, findings=loose), tmp_path)
    assert not half.exists() and not endpoint.exists()


def test_machine_facts_need_no_torch() -> None:
    program = (
        "import sys; from penstock.client.doctor import examine; report = examine(None);"
        "assert report.machine['torch'][0].isdigit() and report.to_text() and report.to_dict();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
