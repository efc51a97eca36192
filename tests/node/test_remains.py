"""Memory in which no model ever was goes; memory with a model stays."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.daemons.node.home import remove_empty_memory
from penstock.shm.inventory import inventory
from penstock.shm.segment import exists, unlink

MAKE = """
import sys
from penstock.shm.control import ControlView, control_bytes
from penstock.shm.segment import Segment
segment = Segment.create(f"/penstock-{sys.argv[1]}-a-control", control_bytes(1, 64))
view = ControlView.initialize(
    segment.buffer, run_id=sys.argv[1], digest=bytes(32), num_blocks=1, undo_bytes=64
)
view.set_incarnation(int(sys.argv[2]))
view.set_committed(5)
"""


@pytest.fixture
def run_id() -> Iterator[str]:
    identity = secrets.token_hex(6)
    yield identity
    unlink(f"/penstock-{identity}-a-control")


@pytest.mark.parametrize(("incarnation", "version"), [(0, None), (3, 5)])
def test_only_empty_memory_is_removed(run_id: str, incarnation: int, version: int | None) -> None:
    subprocess.run([sys.executable, "-c", MAKE, run_id, str(incarnation)], check=True, timeout=30)
    [entry] = [e for e in inventory() if e.run_id == run_id]
    assert entry.committed == version
    assert not remove_empty_memory(run_id, "b")
    assert remove_empty_memory(run_id, "a") is (version is None)
    assert exists(f"/penstock-{run_id}-a-control") is (version is not None)
