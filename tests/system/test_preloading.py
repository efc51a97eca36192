"""Whole runs with preloaders and without: the same bytes, also when preloaders are lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.host.process_identity import start_ticks
from tests.system import conftest as H


def preloaders_of(node: int) -> dict[str, int]:
    """Kind -> pid of the preloaders that a node owns."""
    children = Path(f"/proc/{node}/task/{node}/children").read_text().split()
    words = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
    return {w[w.index("--kind") + 1]: pid for pid, w in words.items() if "--kind" in w}


def test_spawned_processes_end_with_the_bytes_of_forked_ones(
    runner: H.Runner, plain_run: Path
) -> None:
    changes = H.merge(H.PLAIN, {"cluster": {"preload": False}})
    spawned = runner.train(runner.configure("spawned", changes))
    assert H.state_bytes(spawned) == H.state_bytes(plain_run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_preloader_is_a_fault_like_any_other(
    runner: H.Runner, plain_run: Path, number: signal.Signals
) -> None:
    run = runner.start(runner.configure("lost", H.PLAIN))
    H.wait_for_step(run, 3)
    members = run.members()
    struck = preloaders_of(members["node.a"])
    assert sorted(struck) == ["plain", "torch"]
    for pid in struck.values():
        os.kill(pid, number)
    for name in ("worker.0", "optimizerd.a"):
        os.kill(members[name], signal.SIGKILL)
    code, output = run.wait(500)
    assert code == 0, output
    assert H.state_bytes(run.run_dir) == H.state_bytes(plain_run)
    assert not any(start_ticks(pid) for pid in struck.values())
