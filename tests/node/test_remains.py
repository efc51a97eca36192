"""Memory in which no model ever was goes; memory with a model stays."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.daemons.node.run_lock import (
    DEATH_WAIT_S,
    RunLock,
    check_nodes,
    node_lock_path,
    remove_empty_memory,
    train_lock_path,
    wait_until_dead,
)
from penstock.host.errors import ConfigError
from penstock.protocol.run.rundir import RunDirectory
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
    subprocess.run([sys.executable, "-c", MAKE, run_id, str(incarnation)], check=True, timeout=600)
    [entry] = [e for e in inventory() if e.run_id == run_id]
    assert entry.committed == version
    assert not remove_empty_memory(run_id, "b")
    assert remove_empty_memory(run_id, "a") is (version is None)
    assert exists(f"/penstock-{run_id}-a-control") is (version is not None)


def test_memory_of_a_renamed_node_is_no_loss_of_steps(run_id: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", MAKE, run_id, "3"], check=True, timeout=600)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": run_id, "created": "", "format": 1}))
    directory = RunDirectory(tmp_path)
    assert not check_nodes(directory, ["a", "b"], saved=0)
    with pytest.raises(ConfigError, match=r"no node a, .* holds step 5, and only step 4 is saved"):
        check_nodes(directory, ["z"], saved=4)
    assert exists(f"/penstock-{run_id}-a-control")
    assert check_nodes(directory, ["z"], saved=5)
    assert not exists(f"/penstock-{run_id}-a-control")


@pytest.mark.parametrize("strange", ["link", "folder", "FIFO"])
def test_a_lock_is_a_file_of_this_user_and_nothing_else(tmp_path: Path, strange: str) -> None:
    """Through a link the holder's name would be written into a file of somebody else's choice."""
    victim, place = tmp_path / "victim", train_lock_path(tmp_path)
    victim.write_text("untouched")
    if strange == "link":
        place.symlink_to(victim)
    elif strange == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    with pytest.raises(ConfigError, match="and a lock of this run is due there"):
        RunLock.acquire(place, wait_s=0.0)
    assert victim.read_text() == "untouched"


def test_a_killed_node_that_is_still_ending_is_waited_for(tmp_path: Path) -> None:
    """The holder lives until it reads the end of its stdin, which another thread closes."""
    place = node_lock_path(tmp_path, "a")
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from penstock.daemons.node.run_lock import RunLock\n"
        "with RunLock.acquire(Path(sys.argv[1]), wait_s=0.0):\n"
        "    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", script, str(place)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"):
            RunLock.acquire(place, wait_s=DEATH_WAIT_S)
        ending = threading.Timer(0.5, holder.stdin.close)
        ending.start()
        wait_until_dead(tmp_path, "a")
        ending.join()
