"""Saves beside training, in real runs: the bytes of a step are those of a run that ends with it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.client.main import app
from penstock.daemons.memory.snapshot import read_manifest
from tests.system import conftest as H

pytestmark = pytest.mark.slow

SAVED = 4
TRAIN: dict[str, Any] = {"steps": 8, "save_every": 1, "keep_snapshots": 9}
CONSTANT: dict[str, Any] = {"schedule": "constant", "warmup_steps": 1}
WAYS: dict[str, dict[str, Any]] = {
    "advance": {},
    "settled early": {"optimizer": {"settle": "early"}},
    "held": {"optimizer": {"speculate": "never"}},
    "split masters": {
        "model": {"dtype": "bf16"},
        "optimizer": {"master": "split", "grad_dtype": "bf16"},
    },
    "in place": {"optimizer": {"rollback": "arithmetic"}},
}


def files_of(run_dir: Path, step: int) -> dict[str, str]:
    """Checksums of a saved state's files."""
    manifest = read_manifest(run_dir / "state" / f"step-{step:08d}")
    return {name: entry.sha256 for name, entry in manifest.files.items()}


def changed(way: str, **train: Any) -> dict[str, Any]:
    """The configuration of a way, with a learning rate that does not depend on the last step."""
    base: dict[str, Any] = {"train": {**TRAIN, **train}, "optimizer": CONSTANT}
    return H.merge(base, WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_saved_on_the_way_is_that_of_a_run_that_ends_there(runner: Any, way: str) -> None:
    whole = runner.train(runner.configure("whole", changed(way)))
    assert sorted(p.name for p in (whole / "state").glob("step-*"))[0] == "step-00000001"
    ended = runner.train(runner.configure("ended", changed(way, steps=SAVED, save_every=0)))
    assert files_of(whole, SAVED) == files_of(ended, SAVED)
    fields = [read_manifest(run / "state" / f"step-{SAVED:08d}") for run in (whole, ended)]
    assert fields[0].scheduler["data_position"] == fields[1].scheduler["data_position"]


def test_the_steps_after_a_rollback_end_with_the_same_bytes(runner: Any) -> None:
    config = runner.configure("run", changed("advance"))
    run_dir = runner.train(config)
    before = files_of(run_dir, 8)
    lines = [(line["loss"], line["data_epoch"]) for line in H.metrics(run_dir)]
    result = CliRunner().invoke(app, ["rollback", str(run_dir), "--to", str(SAVED)])
    assert result.exit_code == 0, result.output
    assert len(H.metrics(run_dir)) == SAVED
    runner.train(config)
    assert files_of(run_dir, 8) == before
    assert [(line["loss"], line["data_epoch"]) for line in H.metrics(run_dir)] == lines


def test_a_rollback_behind_memory_that_was_kept(runner: Any) -> None:
    config = runner.configure("run", changed("advance", steps=400, save_every=2))
    run = runner.start(config)
    H.wait_for_step(run, 9)
    for _ in range(2):  # the second one kills, and memory stays
        run.process.send_signal(signal.SIGINT)
    assert run.wait(500)[0] == 130
    step = read_manifest(H.newest_state(run.run_dir)).version - 2
    expected = files_of(run.run_dir, step + 2)
    result = CliRunner().invoke(app, ["rollback", str(run.run_dir), "--to", str(step)])
    assert result.exit_code == 0, result.output
    config = runner.configure("run", changed("advance", steps=step + 2, save_every=2))
    runner.train(config)
    assert files_of(run.run_dir, step + 2) == expected
