"""Bad input ends with the contract's exit code and one clear message; saved state stays."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shelf import prepared
from tests.system.conftest import PLAIN

SHORT = {"train": {"steps": 3}}


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stepz=3", ["train.stepz", "unknown key", "steps"]),
        ("schedule.forward_stages=50", ["forward_stages", "50", "8"]),
        ("train.micro_batch=3", ["global_batch", "8", "micro_batch", "3"]),
        ("data.path=/nonexistent/*.txt", ["data.path", "/nonexistent"]),
        ("model.hf.model_type=nonsense", ["model_type", "nonsense"]),
        ("optimizer.name=foo", ["optimizer.name", "foo", "adamw"]),
        ("optimizer.cores=[0,4096]", ["optimizer.cores", "4096"]),
        ("memory.host_limit=1M", []),
    ],
)
def test_configuration_errors(runner: Any, plain_run: Path, setting: str, words: list[str]) -> None:
    path = runner.configure("bad", merge_scheme(SHORT))
    prepared(plain_run, runner.root / "bad")
    code, output = runner.call("train", str(path), "--set", setting)
    assert code == (3 if setting.startswith("memory") else 2), output
    assert all(word in output for word in words), output
    assert "Traceback" not in output
    assert not (runner.root / "bad" / "plan.json").exists(), "nothing was written for a start"


def merge_scheme(changes: dict[str, Any]) -> dict[str, Any]:
    """The same changes with the scheme whose stage counts are free."""
    return {**changes, "schedule": {"scheme": "spipe"}}


def test_port_in_use(runner: Any, plain_run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = runner.configure("port", {**SHORT, "cluster": {"scheduler_port": port}})
        prepared(plain_run, runner.root / "port")
        code, output = runner.call("train", str(path))
    assert code == 2, output
    assert str(port) in output and "scheduler_port" in output
    assert "Traceback" not in output


def can_mount() -> bool:
    """Whether this user may mount a small /dev/shm in a mount namespace of its own."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=600).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small tmpfs")
def test_shared_memory_too_small(runner: Any, plain_run: Path) -> None:
    path = runner.configure("small", SHORT)
    prepared(plain_run, runner.root / "small")
    command = [sys.executable, "-m", "penstock.client.main", "train", str(path)]
    script = 'mount -t tmpfs -o size=512K tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 3, output
    assert "/dev/shm" in output and "512.0 KiB" in output
    assert "Traceback" not in output


def break_truncate(state: Path) -> None:
    """Cut one block's file short."""
    victim = sorted(state.glob("block-*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])


def break_flip(state: Path) -> None:
    """Change one byte of one block's data."""
    victim = sorted(state.glob("block-*.safetensors"))[2]
    data = bytearray(victim.read_bytes())
    data[-5] ^= 0xFF
    victim.write_bytes(data)


def break_manifest(state: Path) -> None:
    """Leave half a manifest."""
    manifest = state / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])


def break_position(state: Path) -> None:
    """Let the run go on with other data."""
    manifest = state / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["scheduler"]["data_position"] += 8
    manifest.write_text(json.dumps(fields))


@pytest.fixture
def finished(runner: Any, plain_run: Path) -> tuple[Path, Path]:
    """A run that has ended: its configuration and its directory."""
    run_dir = runner.root / "run"
    shutil.copytree(plain_run, run_dir)
    return runner.configure("run", PLAIN), run_dir


@pytest.mark.parametrize(
    "damages",
    [
        pytest.param((break_flip,), id="a flipped bit"),
        pytest.param(
            (break_position, break_truncate, break_manifest), id="others", marks=pytest.mark.slow
        ),
    ],
)
def test_damaged_state_is_refused_and_left_alone(
    runner: Any,
    finished: tuple[Path, Path],
    tmp_path: Path,
    damages: tuple[Callable[[Path], None], ...],
) -> None:
    """Undamaged, such states are resumed in ``test_runs.py``."""
    path, run_dir = finished
    whole = tmp_path / "whole"
    shutil.copytree(run_dir, whole)
    for damage in damages:
        state = max((run_dir / "state").glob("step-*"))
        damage(state)
        before = tree(run_dir / "state")
        code, output = runner.call("train", str(path), "--set", "train.steps=45")
        assert code == 2, f"{damage.__name__}: {output}"
        assert state.name in output, f"{damage.__name__}: {output}"
        assert "Traceback" not in output
        assert tree(run_dir / "state") == before, damage.__name__
        shutil.rmtree(run_dir)
        shutil.copytree(whole, run_dir)


def test_other_tokens_than_those_prepared_end_the_run_with_its_state_kept(
    runner: Any, finished: tuple[Path, Path]
) -> None:
    path, run_dir = finished
    tokens = run_dir / "data" / "train.bin"
    whole = tokens.read_bytes()
    damaged = bytearray(whole)
    for offset in range(0, len(damaged), 2**16):
        damaged[offset + 1] ^= 1
    tokens.write_bytes(damaged)
    steps = ("--set", f"train.steps={PLAIN['train']['steps'] + 2}")
    before = tree(run_dir / "state")
    code, output = runner.call("train", str(path), *steps)
    assert code == 2, output
    assert "train.bin: the 65536 bytes from offset" in output and "Traceback" not in output
    assert tree(run_dir / "state") == before
    tokens.write_bytes(whole)
    code, output = runner.call("train", str(path), *steps)
    assert code == 0, output


def test_resume_refuses_another_model(runner: Any, finished: tuple[Path, Path]) -> None:
    path, _ = finished
    code, output = runner.call("train", str(path), "--set", "model.hf.hidden_size=64")
    assert code == 2, output
    assert "model.hf" in output and "hidden_size" in output
