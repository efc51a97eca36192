"""Nodes that find each other by an engine's variables alone, on hosts that share nothing but a file
system: pods of a JobSet first, then, on other hosts with other addresses, tasks of a Slurm step.
The engines are not there, only what they set.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from penstock.host.errors import ExitCode
from tests.integration.netbed import NetBed, Running, missing
from tests.shelf import Shelf
from tests.system import conftest as H

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(missing() != "", reason=missing()),
]

PODS = ("tiny-node-0-0.tiny", "tiny-node-0-1.tiny")
TASKS = ("rack1n08", "rack1n09")
COMMAND = (sys.executable, "-m", "penstock.client.main")
WAIT_S = 600.0


def pod(rank: int) -> Mapping[str, str]:
    names = {"JOBSET_NAME": "tiny", "REPLICATED_JOB_NAME": "node", "JOB_INDEX": "0"}
    return {**names, "JOB_COMPLETION_INDEX": str(rank), "NNODES": "2"}


def task(rank: int) -> Mapping[str, str]:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "rack1n[08-09]"}
    counts = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    here = {"SLURM_NODEID": str(rank), "SLURMD_NODENAME": TASKS[rank]}
    return {"SLURM_JOB_ID": "814", **step, **counts, **here}


def start(bed: NetBed, config: Path, environments: Sequence[Mapping[str, str]]) -> list[Running]:
    """The same command on all hosts, the last first."""
    argv = [*COMMAND, "node", "--config", str(config)]
    started = [
        host.start(argv, config.with_suffix(f".{rank}.txt"), environment)
        for rank, (host, environment) in reversed(
            list(enumerate(zip(bed, environments, strict=True)))
        )
    ]
    print(f"started {' '.join(argv[3:])} on {', '.join(bed.hosts)} with {environments[0]}")
    return started[::-1]


def cluster_of(run_dir: Path) -> dict[str, object]:
    cluster = yaml.safe_load((run_dir / "resolved.yaml").read_text())["cluster"]
    return {
        "nodes": [(node["name"], node["host"]) for node in cluster["nodes"]],
        "port": cluster["scheduler_port"],
    }


@pytest.mark.timeout(2400)
def test_pods_then_tasks_on_other_hosts(tmp_path: Path, shelf: Shelf) -> None:
    cluster = {"workers": 1, "security": "insecure"}
    runner = H.Runner(tmp_path, shelf)
    config = runner.configure("run", H.merge(H.ENDLESS, {"cluster": cluster}))
    run_dir = tmp_path / "run"
    with NetBed(tmp_path, PODS) as bed:
        nodes = start(bed, config, [pod(0), pod(1)])
        H.wait_for_step(H.TrainProcess(nodes[0].process, run_dir), 3, WAIT_S)  # type: ignore[arg-type]
        print(bed[PODS[1]].run(*COMMAND, "stop", "--run-dir", str(run_dir)).strip())
        told = "\n".join(node.text() for node in nodes)
        assert [node.wait(WAIT_S) for node in nodes] == [ExitCode.STOPPED] * 2, told
        assert cluster_of(run_dir) == {
            "nodes": [("node-0", PODS[0]), ("node-1", PODS[1])],
            "port": 29_600,
        }
    step = int(H.newest_state(run_dir).name.removeprefix("step-"))
    assert step >= 3
    steps = step + 20
    fields = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(H.merge(fields, {"train": {"steps": steps}})))
    with NetBed(tmp_path, TASKS, subnet="10.99.8") as bed:
        nodes = start(bed, config, [task(0), task(1)])
        told = "\n".join(node.text() for node in nodes)
        assert [node.wait(WAIT_S) for node in nodes] == [ExitCode.DONE] * 2, told
        assert cluster_of(run_dir) == {
            "nodes": [("node-0", "10.99.8.1"), ("node-1", "10.99.8.2")],
            "port": 20_814,
        }
    alone = runner.train(runner.configure("alone", H.endless_until(steps)))
    assert H.state_bytes(run_dir) == H.state_bytes(alone)
