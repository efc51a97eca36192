"""A run that goes on from another run's checkpoint: refusals and kills lose nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from penstock.client.exchange.imports import REPORT
from penstock.daemons.node.preparing.prepare import IMPORTING
from tests.system import conftest as H

SAVING = {"train": {"steps": 8, "save_every": 4, "keep_snapshots": 9}}


def imported(runner: Any, name: str, source: Path, *options: str) -> tuple[int, str, Path]:
    """Calls ``penstock import`` with a configuration of its own; code, output, run directory."""
    config = runner.configure(name, SAVING)
    run_dir = runner.root / name
    words = ("import", source, "--config", config, "--run-dir", run_dir, *options)
    return (*runner.call(*words), run_dir)


def test_a_run_goes_on_from_another_runs_state(runner: Any) -> None:
    """Steps, place in the data and moments carry over: equal bytes at the end."""
    first = runner.train(runner.configure("first", SAVING))
    half = first / "state" / "step-00000004"
    code, output, run_dir = imported(runner, "second", half, "--verify")
    assert code == 0, output
    report = json.loads((run_dir / REPORT).read_text())
    assert (report["kind"], report["step"], report["samples_seen"]) == ("penstock", 4, 32)
    assert not (run_dir / IMPORTING).exists()
    runner.train(runner.root / "second.yaml")
    assert H.state_bytes(run_dir) == H.state_bytes(first)

    code, output, _ = imported(runner, "second", half)
    assert code == 2 and "an import makes a new run" in output
    assert H.state_bytes(run_dir) == H.state_bytes(first)


def test_a_dry_run_and_a_refusal_write_nothing(runner: Any) -> None:
    first = runner.train(runner.configure("first", SAVING))
    code, output, run_dir = imported(runner, "dry", first, "--dry-run", "--json")
    assert code == 0 and '"step": 8' in output, output
    assert not run_dir.exists()

    other = {"model": {"hf": {**H.TINY_LLAMA, "intermediate_size": 96}}}
    config = runner.configure("other", H.merge(SAVING, other))
    target = runner.root / "other"
    code, output = runner.call("import", first, "--config", config, "--run-dir", target)
    assert code == 2 and "the configuration's model has [96, " in output, output
    assert not target.exists()


def test_a_killed_import_is_no_run_and_can_be_repeated(runner: Any) -> None:
    first = runner.train(runner.configure("first", SAVING))
    config, run_dir = runner.configure("killed", SAVING), runner.root / "killed"
    words = ("import", str(first), "--config", str(config), "--run-dir", str(run_dir))
    process = runner.command(*words)
    while not (run_dir / "run.json").exists():  # the marker is there, the state is not
        assert process.poll() is None, process.communicate(timeout=60)
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert (run_dir / IMPORTING).exists()
    code, output = runner.call("train", config)
    assert code == 2 and "penstock import did not complete here" in output, output
    code, output = runner.call(*words)
    assert code == 0, output
    assert H.state_bytes(run_dir) == H.state_bytes(first)


def test_a_failure_while_writing_leaves_no_run_and_can_be_repeated(runner: Any) -> None:
    first = runner.train(runner.configure("first", SAVING))
    path = first / "state" / "step-00000008" / "block-0001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, output, run_dir = imported(runner, "again", first)
    assert code == 2 and f"{path.name}: is damaged: its checksum differs" in output, output
    assert [each for each in run_dir.iterdir() if not each.name.startswith(".lock")] == []
    path.write_bytes(content)
    code, output, _ = imported(runner, "again", first)
    assert code == 0, output
    assert H.state_bytes(run_dir) == H.state_bytes(first)
