"""Runs that faults are planted into, each with a /dev/shm (and a small disk, or a memory limit) of
its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from penstock.protocol.wire.control import ControlClient
from tests.groups import group
from tests.system.conftest import MEMBER_KINDS, TINY_LLAMA, merge, newest_step, processes_of

KINDS = (*MEMBER_KINDS, "metricsd", "observerd")


EMULATED: dict[str, Any] = {
    "model": {"dtype": "fp16"},
    "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 256},
    "train": {
        "steps": 100_000,
        "global_batch": 8,
        "micro_batch": 2,
        "clip_grad_norm": None,
        "save_every": 20,
        "eval_every": 15,
    },
    "optimizer": {"grad_dtype": "bf16", "threads": 1},
    "schedule": {"scheme": "1f1b"},
    "cluster": {
        "workers": 2,
        "device": "emulated:analytic:V100-32:gpt3-1.3b",
        "heartbeat_timeout_s": 600.0,
        "cpus_per_node": 1,
    },
    "emulation": {"scale": "1/1000", "time_scale": 2.0},
    "observability": {"sample_every": 10},
}
"""Two emulated GPUs whose steps take 0.8 s, and little of this machine. Nobody is taken for lost
while others keep the machine busy, but in the faults that need it.
"""
STEP_S = 0.8
"""Of these, and a save after each 20."""

REAL: dict[str, Any] = {
    "model": {"dtype": "fp32", "hf": TINY_LLAMA},
    "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": 64},
    "train": {"steps": 1_000_000, "global_batch": 8, "micro_batch": 2, "clip_grad_norm": None},
    "optimizer": {"lr": 1.0e-4, "threads": 1},
    "schedule": {"scheme": "1f1b"},
    "cluster": {"workers": 2, "threads_per_worker": 1, "cpus_per_node": 1},
    "observability": {"sample_every": 10},
}
"""A tiny model on CPUs."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``shm_mib``: size of its /dev/shm. ``disk_mib``: its run directory is on a disk so small; 0:
    where all others are. ``memory_mib``: its control group may have so much; 0: what it wants.
    ``by_hand``: each node is started by itself, and nobody starts it again.
    """

    base: Mapping[str, Any] = field(default_factory=lambda: EMULATED)
    changes: Mapping[str, Any] = field(default_factory=dict)
    shm_mib: int = 512
    disk_mib: int = 0
    memory_mib: int = 0
    by_hand: bool = False


class FaultyRun:
    """A run of ``settings`` below ``folder``, from ``with`` to its end, when it is killed."""

    def __init__(self, name: str, folder: Path, targets: Path, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self._disk = self.folder / "disk" if settings.disk_mib else None
        place = self.folder if self._disk is None else self._disk
        if self._disk is not None:
            self._disk.mkdir()
        own = {
            "run": {"name": name, "dir": str(place / "run")},
            "observability": {"targets": str(targets)},
        }
        self._targets = targets
        self._named = place / "run"
        changed = merge(dict(settings.base), dict(settings.changes))
        self.config = self.folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(merge(changed, own)))
        self.group: Path | None = None
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FaultyRun:
        if self.settings.memory_mib:
            limit = self.settings.memory_mib * 2**20
            self.group = self._stack.enter_context(group("memory", memory_limit_in_bytes=limit))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._stack.close()

    def start(self, *arguments: str) -> None:
        """Start ``penstock train``, or the nodes one by one."""
        if not self.settings.by_hand:
            self._start("train", ("train", str(self.config), *arguments))
            return
        for node in yaml.safe_load(self.config.read_text())["cluster"]["nodes"]:
            words = ("node", "--config", str(self.config), "--node", node["name"])
            self._start(node["name"], words)

    def _start(self, name: str, words: Sequence[str]) -> None:
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "--propagation",
            "private",
        ]
        command += ["sh", "-c", f'set -e; {self._mounts()}; exec "$@"', "sh"]
        command += [sys.executable, "-m", "penstock.client.main", *words]
        with (self.folder / f"{name}.txt").open("ab") as output:
            self.nodes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=self._join_group if self.group is not None else None,
            )

    def _mounts(self) -> str:
        mounts = [f"mount -t tmpfs -o size={self.settings.shm_mib}m tmpfs /dev/shm"]
        if self._disk is not None:
            size = f"{self.settings.disk_mib}m"
            mounts.append(f"mount -t tmpfs -o size={size} tmpfs {self._disk}")
        return "; ".join(mounts)

    def inside(self, *command: str) -> list[str]:
        """A command in the run's mount namespace."""
        process = next(iter(self.nodes.values()))
        return ["nsenter", f"--target={process.pid}", "--mount", *command]

    def _join_group(self) -> None:
        assert self.group is not None
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def root(self) -> Path:
        """The root of what its processes see."""
        process = next(iter(self.nodes.values()))
        return Path(f"/proc/{process.pid}/root")

    @property
    def run_dir(self) -> Path:
        """The run directory, as this process sees it."""
        return self._named if self._disk is None else self.root / str(self._named).lstrip("/")

    @property
    def state(self) -> Path:
        """Where saved states are, as its processes see it."""
        return self._named / "state"

    @property
    def disk(self) -> Path:
        """The small disk, as this process sees it."""
        return self.root / str(self._disk).lstrip("/")

    def _forget(self, run_id: str) -> None:
        for path in self._targets.glob(f"{run_id}.*.json"):
            path.unlink()

    def pids(self) -> dict[str, int]:
        """Name -> pid of its living processes."""
        return processes_of(self._named, KINDS)

    def pid(self, name: str, timeout_s: float = 600.0) -> int:
        """The pid of a process; waits until it is there."""
        deadline = time.monotonic() + timeout_s
        while (found := self.pids().get(name)) is None:
            assert time.monotonic() < deadline, f"{self.name} has no {name}: {self.said()}"
            time.sleep(0.1)
        return found

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a process a signal."""
        with suppress(ProcessLookupError):
            os.kill(self.pid(name), number)

    def control(self) -> ControlClient:
        """Asks the scheduler."""
        return ControlClient.for_run(self.run_dir)

    def wait_for_step(self, step: int, timeout_s: float = 600.0) -> None:
        """Wait until it is committed."""
        deadline = time.monotonic() + timeout_s
        while newest_step(self.run_dir) < step:
            ended = [name for name, node in self.nodes.items() if node.poll() is not None]
            assert not ended, f"{self.name}: {ended} ended\n{self.said()}"
            assert time.monotonic() < deadline, f"{self.name}: no step {step}\n{self.said()}"
            time.sleep(0.2)

    def wait(self, timeout_s: float) -> dict[str, int]:
        """Exit codes, when it has ended."""
        return {name: node.wait(timeout_s) for name, node in self.nodes.items()}

    def said(self) -> str:
        """The end of what it printed."""
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.txt"))

    def kill(self) -> None:
        """End all of its processes, whatever state they are in; its nodes are no targets then."""
        with suppress(OSError):
            run_id = json.loads((self.run_dir / "run.json").read_text())["run_id"]
            self._stack.callback(self._forget, run_id)
        for node in self.nodes.values():
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait(timeout=600)
        deadline = time.monotonic() + 600.0
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
