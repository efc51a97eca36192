"""Whole runs of two nodes that read each other's memory: same bytes, whoever dies or lacks NIXL."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.daemons.fetch.agent import find_module
from tests.forked import Forking
from tests.shelf import Shelf
from tests.system import conftest as H

NODES = [{"name": "a"}, {"name": "b"}]
MODEL: dict[str, Any] = {
    "train": {"steps": 16, "clip_grad_norm": 2.7},
    "model": {"hf": {"tie_word_embeddings": True, "hidden_size": 128, "intermediate_size": 256}},
    "schedule": {"scheme": "spipe"},
    "cluster": {
        "workers": 1,
        "preload": False,
        "heartbeat_interval_s": 0.2,
        "heartbeat_timeout_s": 2.0,
    },
}
OVER_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
WITHOUT_NIXL = """
import sys
if "--node" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("--node") + 1] == "b":
    sys.modules["nixl_cu12"] = sys.modules["nixl_cu13"] = None
"""
"""Python reads this at its start, and finds no NIXL on node b. (Forked processes learn later which
node is theirs.)"""

WAYS = {"nixl": "read from its memory, by NIXL", "zmq": "memoryd is asked, by ZeroMQ"}
"""What the log says when blocks of a node begin to come another way."""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_module() is None, reason="NIXL is not installed: [rdma]"),
]


def said(run_dir: Path, text: str) -> dict[str, int]:
    """Process -> how often its log says something."""
    found = {path.stem: path.read_text().count(text) for path in run_dir.glob("logs/*.jsonl")}
    return {process: count for process, count in found.items() if count}


def fetchds(run_dir: Path) -> list[int]:
    """Process ids of a run's living fetchds."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            continue
        if "fetchd" in words and any(Path(word).is_relative_to(run_dir) for word in words):
            found.append(int(entry.name))
    return found


def two_nodes(runner: Any, name: str, fetch: str, env: dict[str, str]) -> H.TrainProcess:
    changes = {"cluster": {"nodes": NODES, "fetch": fetch, "max_restarts": 100}}
    run: H.TrainProcess = runner.start(runner.configure(name, H.merge(MODEL, changes)), env=env)
    return run


def finished(run: H.TrainProcess) -> dict[str, bytes]:
    code, output = run.wait(500)
    assert code == 0, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert not fetchds(run.run_dir)
    return H.state_bytes(run.run_dir)


def disturb(run: H.TrainProcess) -> int:
    """Kill a fetchd now and then, and stop one, until the run ends; how often."""
    chosen, strikes = random.Random(5), 0
    H.wait_for_step(run, 2)
    while run.process.poll() is None:
        alive = fetchds(run.run_dir)
        if alive:
            number = signal.SIGSTOP if strikes % 5 == 4 else signal.SIGKILL
            try:
                os.kill(chosen.choice(alive), number)
                strikes += 1
            except ProcessLookupError:
                pass
        time.sleep(chosen.uniform(0.3, 1.2))
    return strikes


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, shelf: Shelf, forking: Forking
) -> Iterator[dict[str, bytes]]:
    """The bytes that one node without any of it ends with."""
    one_node = H.merge(MODEL, {"cluster": {"workers": 2}})
    for run_dir in H.trained(tmp_path_factory.mktemp("one"), shelf, forking, one_node):
        yield H.state_bytes(run_dir)


def test_one_sided_reads_change_no_byte(runner: Any, expected: dict[str, bytes]) -> None:
    zmq = two_nodes(runner, "zmq", "zmq", {})
    assert finished(zmq) == expected
    nixl = two_nodes(runner, "nixl", "nixl", OVER_TCP)
    assert finished(nixl) == expected
    by_nixl = said(nixl.run_dir, WAYS["nixl"])
    assert {"worker.0", "worker.1"} <= by_nixl.keys()
    assert not said(nixl.run_dir, "Traceback")
    rates = {r.run_dir.name: rate(r.run_dir) for r in (zmq, nixl)}
    print(f"one node, two by ZeroMQ, two by NIXL over TCP: same bytes; tokens/s {rates}")
    print(f"read one-sidedly by {sorted(by_nixl)}")


def test_a_run_goes_on_while_its_fetchds_are_killed_again_and_again(
    runner: Any, expected: dict[str, bytes]
) -> None:
    run = two_nodes(runner, "struck", "nixl", OVER_TCP)
    strikes = disturb(run)
    assert finished(run) == expected
    ways = {way: sum(said(run.run_dir, text).values()) for way, text in WAYS.items()}
    print(f"fetchds killed or stopped {strikes} times; same bytes; changes of way: {ways}")
    assert strikes > 2
    assert all(ways.values())


def test_a_node_with_nixl_and_one_without_work_together(
    runner: Any, expected: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT_NIXL)
    env = {**OVER_TCP, "PYTHONPATH": str(tmp_path / "without")}
    run = two_nodes(runner, "mixed", "nixl", env)
    assert finished(run) == expected
    assert said(run.run_dir, "is not installed").keys() == {"node.b"}
    assert not (run.run_dir / "logs" / "fetchd.b.jsonl").exists()
    why = said(run.run_dir, "no fetchd runs on this node now")
    assert "worker.0" in why  # what node b's memoryd answered
    assert not said(run.run_dir, WAYS["nixl"])
    print(f"node b without NIXL: same bytes, by ZeroMQ; said by {sorted(why)}")


def rate(run_dir: Path) -> float:
    """Tokens per second, the median."""
    rates = sorted(entry["tokens_per_second"] for entry in H.metrics(run_dir))
    return round(rates[len(rates) // 2], 1)
