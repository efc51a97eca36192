"""Whole runs of two nodes that keep replicas of each other's state (``memory.mirror``)."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import ControlClient
from penstock.shm.memory import NodeMemory
from tests.system import conftest as H
from tests.system import test_emulated as E

TWO_NODES: dict[str, Any] = {
    "cluster": {
        "workers": 1,
        "nodes": [{"name": "a"}, {"name": "b"}],
        "heartbeat_interval_s": 0.2,
        "heartbeat_timeout_s": 2.0,
    },
}


MIRRORED = H.merge(H.merge(H.CLIPPED, TWO_NODES), {"memory": {"mirror": "partner"}})


def lose_node(run: H.TrainProcess, node: str) -> None:
    """A machine is gone: its memory, and all processes at once."""
    run_id = RunDirectory(run.run_dir).run_id
    for path in Path("/dev/shm").glob(f"penstock-{run_id}-{node}[-.]*"):
        path.unlink()  # processes have it mapped until they die
    os.kill(H.processes_of(run.run_dir, ["node"])[f"node.{node}"], signal.SIGKILL)


def logged(run_dir: Path, process: str, text: str) -> list[str]:
    """Messages of a process's log that contain a text."""
    path = run_dir / "logs" / f"{process}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [m for m in (json.loads(line)["message"] for line in lines) if text in m]


def wait_for_replicas(run: H.TrainProcess, *, keeper: str, lost: str, times: int) -> None:
    """Wait until the keeper has a whole replica, and the node that was lost has read its own again,
    so many times in all.
    """
    deadline = time.monotonic() + 240
    wanted = {keeper: 1, lost: times}
    while any(
        len(logged(run.run_dir, f"mirrord.{node}", "are mirrored")) < count
        for node, count in wanted.items()
    ):
        assert run.process.poll() is None and time.monotonic() < deadline, "replicas are not read"
        time.sleep(0.05)


def assert_replicas_equal(run_dir: Path) -> None:
    """Each replica holds, bit for bit, the state of its owner; nobody may write meanwhile."""
    run = RunDirectory(run_dir)
    for owner in range(2):
        memory = NodeMemory.attach(run.memory_spec(owner))
        replica = NodeMemory.attach(run.replica_spec(owner))
        assert replica.control.committed == memory.control.committed > 0
        for block in memory.owned_blocks():
            version = memory.control.state_version(block)
            assert replica.control.state_version(block) == version == memory.control.committed
            master = memory.load_master(block, version)
            assert np.array_equal(replica.state(block, "master"), master)
            for name in run.table.state_arrays:
                found = memory.state(block, name, version)
                assert np.array_equal(replica.state(block, name), found), (block, name)
        memory.close()
        replica.close()


GROUPS = {"optimizer": {"groups": [{"match": "proj", "rate": 0.3, "weight_decay": 0.2}]}}
SPLIT = {"model": {"dtype": "bf16"}, "optimizer": {"master": "split", "grad_dtype": "bf16"}}


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, SPLIT, GROUPS], ids=["fp32", "split", "groups"])
def test_replicas_are_the_owners_bytes(runner: Any, changed: dict[str, Any]) -> None:
    changes = H.merge(H.merge(MIRRORED, {"train": {"steps": 100_000}}), changed)
    run = runner.start(runner.configure("run", changes))
    H.wait_for_step(run, 12)
    with ControlClient.for_run(run.run_dir) as client:
        client.pause()
        client.snapshot()  # its settle brings the owners' state to the committed step
        while client.status().phase != "paused":
            time.sleep(0.05)
        assert_replicas_equal(run.run_dir)
        client.stop()
    code, output = run.wait(500)
    assert code == 5, output
    assert not H.segments_of(runner.root)


EMULATED: dict[str, Any] = H.merge(
    E.CHANGES,
    {
        "cluster": {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}]},
        "emulation": {"time_scale": 0.5},
        "observability": {"trace": False},
        "schedule": {"scheme": "1f1b"},
        "train": {"steps": 60},
    },
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", ["a", "b"], ids=["the scheduler's node", "the other node"])
def test_a_node_lost_with_its_memory_costs_no_step(runner: Any, lost: str) -> None:
    """Again and again, as soon as its replica is complete; node a has the scheduler, too."""
    plain = runner.configure("plain", EMULATED)
    expected = H.state_bytes(runner.train(plain))
    changes = H.merge(EMULATED, {"memory": {"mirror": "partner"}})
    run = runner.start(runner.configure("run", changes))
    for times in range(1, 4):
        wait_for_replicas(run, keeper={"a": "b", "b": "a"}[lost], lost=lost, times=times)
        lose_node(run, lost)
    code, output = run.wait(400)
    assert code == 0, f"{output}\n{H.tail_logs(run.run_dir)}"
    assert H.state_bytes(run.run_dir) == expected
    assert len(logged(run.run_dir, "schedulerd", "is filled from the replica")) == 3
    assert len(logged(run.run_dir, "schedulerd", "restoring from")) == 1, "the first start"
    done = [line["step"] for line in H.metrics(run.run_dir)]
    assert sorted(set(done)) == list(range(1, 61)) and done == sorted(done), "no step was lost"
    assert not H.segments_of(runner.root)
