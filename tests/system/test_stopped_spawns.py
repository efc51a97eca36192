"""Newborns that a signal stops at random instants between clone and exec, in runs that kills of
members disturb.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.daemons.node.service import LONGEST_SLEEP_S
from tests.newborns import NewbornStopper
from tests.system import conftest as H
from tests.system.test_exactness import awaited
from tests.system.test_preloading import preloaders_of

GATE, SPAWNED, FORKED = 3, 160, 40
"""Newborns to stop: in the gate, and in the slow tests, 200 together."""
SHARE = 0.8
"""The share of newborns that are stopped."""
EXEC_AFTER = 12
"""System-call stops from clone to exec in a spawned newborn."""
FORKED_AFTER = {1: 5, 2: 41}
"""System-call stops that both generations of a preloader's newborns make for certain."""
HEARTBEAT_S = 2.0
LATE_S = 2 * LONGEST_SLEEP_S
"""A node looks at its children once a second, and when the time of one is over. Other load, and the
0.1 s in which a spawned process may begin its program, hold up a look for another second at most.
"""
WAIT_S = 600.0
TARGETS = ("worker.0", "worker.1", "optimizerd.a", "memoryd.a", "schedulerd")
ENDLESS = H.merge(
    H.CLIPPED,
    {
        "train": {"steps": 10**6},
        "optimizer": H.ENDLESS["optimizer"],
        "cluster": {"max_restarts": 1000, "preload": False},
    },
)


def seeded() -> random.Random:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    return random.Random(seed)


def strike(run: Any, target: str) -> None:
    """Kills a member, and returns when the run has made a step with the member's replacement."""
    pid = awaited(run, target, lambda pid: pid is not None)
    assert pid is not None
    with suppress(ProcessLookupError):  # the member was dying
        os.kill(pid, signal.SIGKILL)
    awaited(run, target, lambda other: other not in (None, pid))
    H.wait_for_step(run, H.newest_step(run.run_dir) + 1, WAIT_S)


def stop_spawned(run: Any, source: random.Random, quota: int) -> list[float]:
    """Stops newborns of a node. Returns how long each of the stopped newborns lived, in seconds."""

    def draw() -> int | None:
        return source.randrange(EXEC_AFTER) if source.random() < SHARE else None

    with NewbornStopper(run.members()["node.a"], draw).tracing() as stopper:
        while len(stopper.stopped) < quota:
            time.sleep(source.random() * 0.1)
            strike(run, source.choice(TARGETS))
            print(f"{len(stopper.stopped)} newborns stopped", flush=True)
        assert len(stopper.died_s) == len(stopper.stopped), "a stopped newborn lives"
    return list(stopper.died_s.values())


def stop_forked(run: Any, source: random.Random, quota: int) -> list[float]:
    """Stops newborns of preloaders, which are killed for that and replaced."""
    lives_s: list[float] = []
    while len(lives_s) < quota:
        target = source.choice(TARGETS)
        kind = "torch" if target.startswith("worker") else "plain"
        generation = source.choice(tuple(FORKED_AFTER))
        counts = itertools.repeat(source.randrange(FORKED_AFTER[generation]))
        pid = idle_preloader(run, kind)
        with NewbornStopper(pid, counts.__next__, generation).tracing() as stopper:
            strike(run, target)
            assert len(stopper.died_s) == len(stopper.stopped), "a stopped newborn lives"
        lives_s += stopper.died_s.values()
        print(f"{len(lives_s)} newborns stopped", flush=True)
    return lives_s


def idle_preloader(run: Any, kind: str) -> int:
    """Returns the pid of a node's preloader that has imported everything: it does no work."""
    deadline_s = time.monotonic() + WAIT_S
    before: tuple[int, bytes] | None = None
    while time.monotonic() < deadline_s:
        now = None
        with suppress(OSError, KeyError):  # a child of the node is dying, or not born
            pid = preloaders_of(run.members()["node.a"])[kind]
            now = pid, Path(f"/proc/{pid}/schedstat").read_bytes()
        if now is not None and now == before:
            return now[0]
        before = now
        time.sleep(1.0)
    raise AssertionError(f"no {kind} preloader in {WAIT_S:g} s")


def end_exact(runner: Any, run: Any, changes: dict[str, Any]) -> None:
    """Ends a run, which has the steps, losses and bytes of an undisturbed run of as many steps."""
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait(WAIT_S)
    assert code == 130, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert not run.members() and not H.segments_of(runner.root)
    steps = H.newest_step(run.run_dir)
    alone = runner.train(
        runner.configure("alone", H.merge(changes, {"train": {"steps": steps}})), timeout_s=3600.0
    )
    lines = [
        [(line["step"], line["loss"]) for line in H.metrics(run_dir)]
        for run_dir in (run.run_dir, alone)
    ]
    assert lines[0] == lines[1]
    assert [step for step, _ in lines[0]] == list(range(1, steps + 1)), "each step exactly once"
    assert H.state_bytes(run.run_dir) == H.state_bytes(alone)
    print(f"{steps} steps, all bytes are equal")


@pytest.mark.timeout(3600)
def test_stopped_newborns_cost_no_byte(runner: Any) -> None:
    run = runner.start(runner.configure("run", ENDLESS))
    H.wait_for_step(run, 2, WAIT_S)
    stop_spawned(run, seeded(), GATE)
    end_exact(runner, run, ENDLESS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("preload", "stop", "quota"),
    [
        pytest.param(False, stop_spawned, SPAWNED, id="spawned"),
        pytest.param(True, stop_forked, FORKED, id="forked"),
    ],
)
def test_two_hundred_stopped_newborns_cost_no_byte_and_no_time(
    runner: Any, preload: bool, stop: Any, quota: int
) -> None:
    changes = H.merge(ENDLESS, {"cluster": {"preload": preload}})
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 2, WAIT_S)
    lives_s = stop(run, seeded(), quota)
    print(f"{len(lives_s)} stopped: median {statistics.median(lives_s):.2f} s", end=", ")
    print(
        f"longest {max(lives_s):.2f} s, {sum(s >= HEARTBEAT_S for s in lives_s)} left to the node"
    )
    end_exact(runner, run, changes)
    assert max(lives_s) <= HEARTBEAT_S + LATE_S
