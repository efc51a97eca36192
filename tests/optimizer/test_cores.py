"""The optimizer's threads keep off cores that another run has pinned threads to."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from penstock.daemons.optimizer.cores import open_pool
from penstock.host import core_locks
from penstock.host.topology import parse_cpus


def threads() -> set[str]:
    """Ids of this process's threads."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def pinned(earlier: set[str]) -> list[int]:
    """CPUs that threads of this process are pinned to, without threads of earlier tests."""
    found = []
    for thread in threads() - earlier:
        status = (Path("/proc/self/task") / thread / "status").read_text()
        cpus = parse_cpus(status.partition("Cpus_allowed_list:")[2].split()[0])
        found += cpus if len(cpus) == 1 else ()
    return found


def test_a_second_run_s_threads_are_not_pinned_to_the_same_core(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Names of this test alone: real runs of this machine may have claimed the core.
    monkeypatch.setattr(core_locks, "_PREFIX", f"\0penstock-test-{os.getpid()}-")
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("a single CPU: pinned or not is the same")
    core, earlier = allowed[-1], threads()
    with open_pool([core]):
        assert pinned(earlier) == [core]
        with caplog.at_level(logging.WARNING), open_pool([core]):
            assert pinned(earlier) == [core], "the first run's"
        assert "another run on this machine has pinned" in caplog.text
    with open_pool([core]):
        assert pinned(earlier) == [core]
