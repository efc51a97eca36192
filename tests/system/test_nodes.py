"""Several ``penstock node`` with one command, as an engine starts them: all at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.host.errors import ExitCode
from penstock.protocol.wire.control import ControlClient
from tests.system import conftest as H


def start(runner: Any, config: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock.client.main", "node", "--config", str(config)]
    with (runner.root / "nodes.txt").open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    runner.started.append(process)
    return process


def start_all(runner: Any, config: Path, count: int, port: int) -> list[subprocess.Popen[bytes]]:
    """torchrun's variables; the last node is started first."""
    common = {"NNODES": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = reversed(range(count))
    return [start(runner, config, {**common, "NODE_RANK": str(rank)}) for rank in ranks]


@pytest.mark.integration
def test_two_nodes_then_one_then_two_end_with_the_same_bytes(runner: Any, plain_run: Path) -> None:
    """Nobody edits the configuration in between, and each start finds the run of the last one."""
    changes = {**H.PLAIN, "cluster": {"workers": 1}}
    config = runner.configure("run", changes)
    run_dir, port = runner.root / "run", 29_431
    said = runner.root / "nodes.txt"
    for count, until in ((2, 8), (1, 20), (2, None)):
        nodes = start_all(runner, config, count, port)
        run = H.TrainProcess(nodes[-1], run_dir)  # type: ignore[arg-type]  # only its code
        if until is not None:
            H.wait_for_step(run, until)
            with ControlClient.for_run(run_dir) as client:
                client.stop()
        code = ExitCode.DONE if until is None else ExitCode.STOPPED
        assert [node.wait(timeout=500) for node in nodes] == [code] * count, said.read_text()
        resolved = yaml.safe_load((run_dir / "resolved.yaml").read_text())["cluster"]["nodes"]
        assert [node["name"] for node in resolved] == ["node-0", "node-1"][:count]
    assert H.state_bytes(run_dir) == H.state_bytes(plain_run)
    assert "torchrun: NODE_RANK=1, so this is node node-1" in said.read_text()
    assert not H.segments_of(runner.root)
