"""Whole runs as a user starts them: ``penstock train`` in a child process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from penstock.chaos.processes import command_lines
from penstock.config.schema import load_config
from penstock.host.process_identity import parent_of
from penstock.protocol.run.names import FOLDER_PREFIX, SOCKET_FOLDERS
from penstock.shm.base_users import sweep
from tests.forked import Forked, Forking
from tests.shelf import Shelf

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

PLAIN: dict[str, Any] = {"train": {"steps": 40, "clip_grad_norm": None}}
CLIPPED: dict[str, Any] = {
    "train": {"steps": 60, "clip_grad_norm": 2.7},
    "model": {"hf": {"tie_word_embeddings": True, "hidden_size": 64, "intermediate_size": 160}},
    "schedule": {"scheme": "spipe"},
    "cluster": {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 2.0},
}
"""Changes of the two runs that many tests look at, or repeat with disturbances."""


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; ``changes`` win."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        both = isinstance(value, dict) and isinstance(inner, dict)
        merged[key] = merge(inner, value) if both and isinstance(inner, dict) else value
    return merged


ENDLESS: dict[str, Any] = {
    "train": {"steps": 10**6, "clip_grad_norm": None},
    "optimizer": {"schedule": "constant", "min_lr": 0.0},
}
"""Changes of a run that a test attacks or looks at, and then stops: the run is never over first.
A step does not depend on the number of steps, so a run of as many steps leaves the same bytes.
"""


def endless_until(steps: int) -> dict[str, Any]:
    """Changes of the run that an :data:`ENDLESS` one is compared with, which was stopped."""
    return merge(ENDLESS, {"train": {"steps": steps}})


MEMBER_KINDS = ("memoryd", "optimizerd", "schedulerd", "worker", "node")


def processes_of(run_dir: Path, kinds: Sequence[str]) -> dict[str, int]:
    """Name -> pid of a run's living processes of some kinds, read from their command lines."""
    found: dict[str, int] = {}
    for pid, words in command_lines():
        if not any(Path(word).is_relative_to(run_dir) for word in words):
            continue
        for kind in kinds:
            if kind in words:
                device = words[words.index("--device") + 1] if "--device" in words else ""
                node = words[words.index("--node") + 1] if "--node" in words else ""
                name = f"{kind}{'.' if device or node else ''}{device or node}"
                if parent_of(pid) != found.get(name):  # else its child, not yet what it is to be
                    found[name] = pid
    return found


@dataclass
class TrainProcess:
    """A running ``penstock train`` in its own process group."""

    process: subprocess.Popen[str] | Forked
    run_dir: Path

    def wait(self, timeout_s: float) -> tuple[int, str]:
        """Exit code and everything printed."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def members(self) -> dict[str, int]:
        """Member name -> pid of the run's living processes, read from their command lines."""
        return processes_of(self.run_dir, MEMBER_KINDS)


@dataclass
class Runner:
    """Writes configurations and starts runs below one temporary directory."""

    root: Path
    shelf: Shelf
    forking: Forking | None = None
    started: list[subprocess.Popen[str] | Forked] = field(default_factory=list)

    def configure(self, name: str, changes: dict[str, Any]) -> Path:
        """Write ``<name>.yaml``: a tiny model on a few standard-library files."""
        text = Path(sysconfig.get_paths()["stdlib"]) / "a*.py"
        base = {
            "run": {"name": name, "seed": 7, "dir": str(self.root / name)},
            "model": {"dtype": "fp32", "hf": TINY_LLAMA},
            "data": {"path": str(text), "tokenizer": "byte", "sequence_length": 32},
            "train": {"steps": 20, "global_batch": 8, "micro_batch": 2, "clip_grad_norm": 1.0},
            "optimizer": {
                "lr": 1.0e-3,
                "weight_decay": 0.1,
                "schedule": "cosine",
                "warmup_steps": 4,
                "min_lr": 1.0e-4,
                "threads": 2,
            },
            "schedule": {"scheme": "1f1b"},
            "cluster": {"workers": 2, "threads_per_worker": 1},
        }
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(merge(base, changes)))
        return path

    def start(
        self, config: Path, *arguments: str, env: dict[str, str] | None = None
    ) -> TrainProcess:
        """Start ``penstock train``."""
        run_dir = load_config(config).run_dir
        self.shelf.take(config, run_dir)
        return TrainProcess(self.command("train", str(config), *arguments, env=env), run_dir)

    def command(
        self, *words: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str] | Forked:
        """Start ``penstock``, forked where that makes no difference."""
        environment = {**os.environ, **(env or {})}
        process: subprocess.Popen[str] | Forked
        if self.forking is not None and self.forking.fits(environment):
            process = self.forking.start("penstock.client.main", words)
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.client.main", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=environment,
            )
        self.started.append(process)
        return process

    def call(self, *words: str | Path, timeout_s: float = 600.0) -> tuple[int, str]:
        """Run ``penstock`` to its end; exit code and what it said."""
        process = self.command(*map(str, words))
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode is not None
        return process.returncode, output

    def train(self, config: Path, *arguments: str, timeout_s: float = 500.0) -> Path:
        """Run to the end; the run directory. A failure shows output and logs."""
        run = self.start(config, *arguments)
        code, output = run.wait(timeout_s)
        assert code == 0, f"exit code {code}\n{output}\n{tail_logs(run.run_dir)}"
        self.shelf.keep(config, run.run_dir)
        return run.run_dir

    def stop_all(self) -> None:
        """Kill whatever still runs, by process group."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=500)
            if process.stdout is not None:
                process.stdout.close()


def tail_logs(run_dir: Path, lines: int = 6) -> str:
    """Last warnings and errors of every log of a run."""
    parts = []
    for path in sorted((run_dir / "logs").glob("*.jsonl")):
        parts += [f"--- {path.name}", *path.read_text().splitlines()[-lines:]]
    return "\n".join(parts)


def metrics(run_dir: Path, phase: str = "train") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of one phase."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["phase"] == phase]


def newest_state(run_dir: Path) -> Path:
    """Directory of the newest saved state."""
    return max((run_dir / "state").glob("step-*"))


def state_bytes(run_dir: Path) -> dict[str, bytes]:
    """Every file of the newest saved state and of its base but the manifest, by name."""
    return {path.name: path.read_bytes() for path in state_files(run_dir)}


def state_files(run_dir: Path) -> list[Path]:
    """Files with tensors of the newest saved state and of its base."""
    state = newest_state(run_dir)
    return sorted((*state.glob("*.safetensors"), *(state.parent / "base").glob("*")))


def arrays(run_dir: Path) -> dict[str, Any]:
    """Every array of the newest saved state, by name."""
    found: dict[str, Any] = {}
    for path in state_files(run_dir):
        found |= load_file(path)
    return found


def newest_step(run_dir: Path) -> int:
    """The committed step that metrics.jsonl shows last, 0 before the first."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    complete = [line for line in lines if line.endswith("}")]
    return int(json.loads(complete[-1])["step"]) if complete else 0


def wait_for_step(run: TrainProcess, step: int, timeout_s: float = 500.0) -> None:
    """Wait until metrics.jsonl shows a committed ``step``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if run.process.poll() is not None:
            output = run.process.stdout.read() if run.process.stdout else ""
            raise AssertionError(
                f"run ended with {run.process.returncode} before step {step}: {output}"
            )
        if newest_step(run.run_dir) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} not reached in {timeout_s} s\n{tail_logs(run.run_dir)}")


KEPT = ("journal.sqlite", ".lock", ".home")
"""The journal with its log; lock files: removing one would break the lock; where the run lives."""


def dirty(run_dir: Path) -> list[str]:
    """Temporary files of a run that nobody would account for."""
    made = {"run.json", "resolved.yaml", "inputs.json", "table.json", "plan.json", "token"}
    allowed = {*made, "metrics.jsonl", "software.json", "places.json", "numerics.json"}
    return [
        p.name
        for p in run_dir.iterdir()
        if p.is_file() and p.name not in allowed and not p.name.startswith(KEPT)
    ]


def segments_of(root: Path) -> list[str]:
    """Segments in /dev/shm of the runs below a directory."""
    ids = [json.loads(p.read_text())["run_id"] for p in root.glob("*/run.json")]
    return [n for n in os.listdir("/dev/shm") if any(n.startswith(f"penstock-{i}-") for i in ids)]


def sockets_of(root: Path) -> list[Path]:
    """Folders of local sockets of the runs below a directory."""
    ids = [json.loads(p.read_text())["run_id"] for p in root.glob("*/run.json")]
    return [f for i in ids for f in SOCKET_FOLDERS.glob(f"{FOLDER_PREFIX}{i}-*")]


@pytest.fixture
def runner(tmp_path: Path, shelf: Shelf, forking: Forking) -> Iterator[Runner]:
    """Start runs; everything started is gone afterwards, and so are its segments."""
    instance = Runner(tmp_path, shelf, forking)
    yield instance
    instance.stop_all()
    leaked = segments_of(tmp_path)
    for name in leaked:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
    sweep()  # bases that only the removed segments named
    for folder in sockets_of(tmp_path):
        leaked.append(folder.name)
        shutil.rmtree(folder)
    expected_leak = any(p.returncode not in (0, 2, 3, 5, 130) for p in instance.started)
    assert expected_leak or not leaked, f"left behind in /dev/shm: {leaked}"


def trained(root: Path, shelf: Shelf, forking: Forking, changes: dict[str, Any]) -> Iterator[Path]:
    """The directory of a finished run; whatever still runs when the tests are over is stopped."""
    runner = Runner(root, shelf, forking)
    try:
        yield runner.train(runner.configure("run", changes))
    finally:
        runner.stop_all()
