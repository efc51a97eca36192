"""A run of ``penstock train`` for as many steps as are measured, and what it shows of itself.

It is killed after them: a run that ends saves its state, which takes longer than all that is
measured. Its memory is in the /dev/shm of the measurement and goes with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.gpu.memory import waken
from bench.gpu.running import Task, processes_naming
from bench.gpu.shapes import Shape

_POLL_S = 0.2
_RESERVE_S = 15.0
"""Before the deadline: what is measured by then counts, and the trace is still to be read."""
BYTES_PER_PARAMETER = {"fp32": 20, "split": 16}
"""Of host memory, by ``optimizer.master``; split also settles early."""
FROZEN_BYTES = 2
"""Bytes of host memory of a frozen parameter."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train. Steps are counted after those to warm up; sections hold keys of ours.

    Clipping is on: a step waits for the gradients' norm. ``clip``, the limit, is one that the first
    steps of a new model stay under, as all steps of a real one do soon. ``schedule``: None sets
    neither schedule nor micro-batch: Penstock chooses both.
    """

    shape: Shape
    device: str
    steps: int
    warmup_steps: int = 2
    workers: int = 1
    schedule: Mapping[str, Any] | None = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    clip: float = 100.0
    trace: bool = True

    @property
    def host_bytes(self) -> int:
        """Of the model's state. Adapters need little."""
        if self.adapter is not None:
            return FROZEN_BYTES * self.shape.parameters
        master = self.optimizer.get("master", "fp32")
        return BYTES_PER_PARAMETER[master] * self.shape.parameters

    def configuration(self, task: Task) -> dict[str, Any]:
        """Returns the configuration for ``penstock train``, with the run in the task folder."""
        folder = task.folder
        shape = self.shape
        chosen = {} if self.schedule is None else {"micro_batch": shape.micro_batch}
        plan = {"scheme": "1f1b", "recompute": "full"} | dict(self.schedule or {})
        return {
            "run": {"name": "ladder", "dir": str(folder / "run")},
            "model": {"dtype": "bf16", "hf": shape.hf, **self.model},
            **({} if self.adapter is None else {"adapter": dict(self.adapter)}),
            "data": {
                "tokens": str(folder / "tokens.bin"),
                "token_dtype": "uint16",
                "sequence_length": shape.sequence,
            },
            "train": {
                "steps": 100_000,
                "global_batch": shape.global_batch,
                "clip_grad_norm": self.clip,
                **chosen,
            },
            "optimizer": {"grad_dtype": "bf16", "lr": 1e-4, **self.optimizer},
            **({} if self.schedule is None else {"schedule": plan}),
            "cluster": {
                "workers": self.workers,
                "device": self.device,
                "pin_memory": task.pins,
            },
            "observability": {"trace": self.trace},
        }


@dataclass(frozen=True, kw_only=True)
class Trained:
    """``steps``: the lines of metrics of those that count. ``start_s``: until the first of all was
    done. ``host_bytes``: the most in shared memory and in its processes.
    """

    run_dir: Path
    steps: list[dict[str, Any]]
    start_s: float
    host_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Of all steps."""
        return float(sum(s["tokens"] for s in self.steps) / sum(s["seconds"] for s in self.steps))


def train(task: Task, recipe: Recipe) -> Trained:
    """Trains until all steps are there, or time is short.

    Raises:
        RuntimeError: the run ended by itself, or had no step to count; has what it said.
    """
    waken(recipe.host_bytes, task.left_s / 4)
    steps = recipe.steps + recipe.warmup_steps
    # More than is needed: the run must not go over its data a second time.
    recipe.shape.tokens(steps + 2).tofile(task.folder / "tokens.bin")
    file = task.folder / "run.yaml"
    file.write_text(yaml.safe_dump(recipe.configuration(task)), encoding="utf-8")
    started_s = time.monotonic()
    with (task.folder / "said").open("wb") as said:
        process = start(file, said)
        try:
            host_bytes, first_s = 0, 0.0
            while len(done := train_steps(task.folder / "run")) < steps:
                first_s = first_s or (time.monotonic() if done else 0.0)
                host_bytes = max(host_bytes, _host_bytes(task.folder))
                if process.poll() is not None or task.left_s < _RESERVE_S:
                    break
                time.sleep(_POLL_S)
            ended = process.poll()
        finally:
            kill(process, task.folder)
    counted = done[recipe.warmup_steps : steps]
    if not counted:
        why = f"exit code {ended}" if ended is not None else "too slow"
        text = (task.folder / "said").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{len(done)} steps, {why}: {text.strip()[-1500:]}")
    return Trained(
        run_dir=task.folder / "run",
        steps=counted,
        start_s=(first_s or time.monotonic()) - started_s,
        host_bytes=host_bytes,
    )


def start(config: Path, said: Any) -> subprocess.Popen[bytes]:
    """Starts ``penstock train`` in a new session."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.client.main", "train", str(config)],
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends a run at once, and waits for the end of its processes."""
    process.kill()
    process.wait()
    until_s = time.monotonic() + 10.0
    while time.monotonic() < until_s and (left := set(processes_naming(folder)) - {os.getpid()}):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def train_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics of committed steps so far."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in found if line["phase"] == "train" and line["decision"] != "skip"]


def _host_bytes(folder: Path) -> int:
    status = os.statvfs("/dev/shm")
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    for pid in processes_naming(folder):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    used += int(line.split()[1]) * 1024
    return used
