"""Runs whose sockets are all attacked while they train: same processes, same bytes, no memory."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.host.process_identity import ProcessUsage
from penstock.protocol.wire.control import ControlClient
from tests.fuzz.live.attacks import ATTACKS, Attack, Attacker
from tests.fuzz.live.places import Place, places_of
from tests.system import conftest as H
from tests.system.conftest import runner as runner

MAX_GROWN_BYTES = 64 << 20
KINDS = (*H.MEMBER_KINDS, "metricsd", "fetchd", "observerd")
LISTENING = {"node", "schedulerd", "memoryd", "optimizerd", "worker"}
"""Who listens from the first step on; helpers may be later."""
TWO_NODES = {
    "workers": 1,
    "nodes": [{"name": "a", "host": "127.0.0.1"}, {"name": "b", "host": "127.0.0.2"}],
}
WAYS = "random mutated stale truncated huge endless slow idle forged".split()
"""What attacks count."""
WARM_STEP = 5
"""Workers have what memory they need by then."""


@dataclass(slots=True)
class Watch:
    """What became of a run's processes; memory that they share is left out."""

    processes: dict[str, int]
    before: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.look()
        self.before = dict(self.most)

    def look(self) -> None:
        """Note who has most memory now."""
        for name, pid in self.processes.items():
            usage = ProcessUsage.of(pid)
            if usage is not None:  # else the run ends
                self.most[name] = max(self.most.get(name, 0), usage.resident_bytes)

    @property
    def grown_mib(self) -> dict[str, float]:
        """How much more each process had at a time than when it was first seen."""
        return {n: round((self.most[n] - self.before[n]) / 2**20, 1) for n in self.before}


def attacked(
    run: H.TrainProcess, *, rounds: int, idle: int, seed: int, at_once: int = 8
) -> tuple[Counter[str], dict[str, float]]:
    """Attack each socket in each way, ``at_once`` at a time, until the run ends or so many rounds
    are over; what was done, and how many MiB each process grew at most. The run stands still
    until each way was tried, since its steps may be over first.
    """
    with ControlClient.for_run(run.run_dir) as client:
        client.pause()
    watch = Watch(H.processes_of(run.run_dir, KINDS))
    places = places_of(watch.processes)
    assert {place.process.partition(".")[0] for place in places} >= LISTENING, places

    def carry_out(attack: Attack, place: Place, number: int) -> Counter[str]:
        attacker = Attacker(
            run_dir=run.run_dir,
            seed=seed + number,
            idle=idle,
            ended=lambda: run.process.poll() is not None,
        )
        if not attacker.ended():
            attack(attacker, place)
        return attacker.done

    pairs = [(attack, place) for _ in range(rounds) for place in places for attack in ATTACKS]
    with descriptors(2 * at_once * idle), ThreadPoolExecutor(at_once) as pool:
        under_way = [pool.submit(carry_out, *pair, n) for n, pair in enumerate(pairs)]
        paused = True
        while not all(future.done() for future in under_way):
            watch.look()
            done = sum((f.result() for f in under_way if f.done()), Counter[str]())
            if paused and all(done[kind] for kind in WAYS):
                with ControlClient.for_run(run.run_dir) as client:
                    client.resume()
                paused = False
            time.sleep(0.05)
    done = sum((future.result() for future in under_way), Counter[str]())
    assert not paused, done
    return done, watch.grown_mib


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """Let this process have so many more files open, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 1024 + count), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check(
    run: H.TrainProcess, reference: Path, done: Counter[str], grown: dict[str, float]
) -> None:
    """The run ends in its first epoch, with the bytes of one that nobody attacked."""
    code, output = run.wait(300.0)
    assert code == 0, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert all(done[kind] for kind in WAYS), done
    # No process was replaced, or an epoch would have ended.
    assert {line["epoch"] for line in H.metrics(run.run_dir)} == {1}
    assert max(grown.values()) * 2**20 < MAX_GROWN_BYTES, grown
    found, expected = H.arrays(run.run_dir), H.arrays(reference)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_two_nodes_whose_sockets_are_attacked(runner: Any, plain_run: Path) -> None:
    run = runner.start(runner.configure("two", {**H.PLAIN, "cluster": TWO_NODES}))
    H.wait_for_step(run, WARM_STEP)
    done, grown = attacked(run, rounds=1, idle=20, seed=1)
    print(f"two nodes: {dict(done)}; MiB more: {grown}")
    check(run, plain_run, done, grown)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nodes", [1, 2])
def test_many_attacks(runner: Any, nodes: int, request: pytest.FixtureRequest) -> None:
    steps = {"train": {"steps": 600, "clip_grad_norm": None}}
    cluster = TWO_NODES if nodes == 2 else {"workers": 2}
    reference = runner.train(runner.configure("alone", {**steps, "cluster": {"workers": 2}}))
    run = runner.start(runner.configure("attacked", {**steps, "cluster": cluster}))
    H.wait_for_step(run, 4 * WARM_STEP)
    seed = request.config.getoption("--soak-seed") or 1
    done, grown = attacked(run, rounds=3, idle=1000, seed=seed)
    print(f"{nodes} nodes, seed {seed}, {H.newest_step(run.run_dir)} steps: {dict(done)}")
    print(f"MiB more: {grown}")
    assert {name.partition(".")[0] for name in grown} >= {"metricsd", "observerd"}
    check(run, reference, done, grown)
