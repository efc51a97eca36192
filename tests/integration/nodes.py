"""A run whose nodes are hosts of a :class:`tests.integration.netbed.NetBed`, one each."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.netbed import NetBed, Running
from tests.system.conftest import merge, newest_step, tail_logs

PORT = 29400


def bed_cluster(bed: NetBed, **changes: Any) -> dict[str, Any]:
    """Returns the section ``cluster`` of a configuration: a node a host, by name, one worker each;
    ``changes`` win.
    """
    nodes = [{"name": host.name, "host": host.name} for host in bed]
    base: dict[str, Any] = {
        "workers": 1,
        "threads_per_worker": 1,
        "scheduler_port": PORT,
        "nodes": nodes,
    }
    base["security"] = "insecure"
    return merge(base, changes)


@dataclass
class BedRun:
    """``penstock node`` on hosts of a bed; the first of them prepares the run."""

    bed: NetBed
    config: Path
    run_dir: Path
    nodes: dict[str, Running] = field(default_factory=dict)

    def start(self, timeout_s: float = 600.0) -> None:
        """Start all nodes; returns when the run is prepared."""
        first, *others = self.bed
        self.start_node(first.name)
        endpoint, deadline = self.run_dir / "endpoint.json", time.monotonic() + timeout_s
        while not endpoint.exists():
            assert self.nodes[first.name].process.poll() is None, self.told()
            assert time.monotonic() < deadline, f"not prepared in {timeout_s} s\n{self.told()}"
            time.sleep(0.05)
        for host in others:
            self.start_node(host.name)

    def start_node(self, name: str) -> None:
        """Start the node of a host, or start it again."""
        argv = [sys.executable, "-m", "penstock.client.main", "node"]
        argv += ["--config", str(self.config), "--node", name]
        log = self.run_dir.parent / f"{self.run_dir.name}-{name}.txt"
        self.nodes[name] = self.bed[name].start(argv, log)

    def wait_for_step(self, step: int, timeout_s: float = 600.0) -> float:
        """Wait until ``step`` is committed; returns the seconds waited."""
        start_s = time.monotonic()
        while newest_step(self.run_dir) < step:
            waited_s = time.monotonic() - start_s
            assert waited_s < timeout_s, f"step {step} not in {timeout_s} s\n{self.told()}"
            ended = [n for n, node in self.nodes.items() if node.process.poll() is not None]
            assert not ended, f"{ended} ended before step {step}\n{self.told()}"
            time.sleep(0.02)
        return time.monotonic() - start_s

    def wait(self, timeout_s: float = 600.0) -> dict[str, int]:
        """Wait for the end of all nodes; returns their exit codes."""
        deadline = time.monotonic() + timeout_s
        try:
            return {
                name: node.wait(max(0.0, deadline - time.monotonic()))
                for name, node in self.nodes.items()
            }
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it does not end\n{self.told()}") from error

    def told(self) -> str:
        """Returns what nodes printed and logged last."""
        said = [f"--- {name}\n{node.text()}" for name, node in self.nodes.items()]
        return "\n".join([*said, tail_logs(self.run_dir)])
