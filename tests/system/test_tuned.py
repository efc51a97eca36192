"""``penstock train`` takes the file that ``penstock tune --out`` writes, in whatever folder."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from penstock.protocol.run.rundir import RunDirectory
from tests.system import conftest as H

pytestmark = pytest.mark.timeout(1200)


def test_a_tuned_file_trains(runner: Any) -> None:
    """The text lies beside the configuration, whose paths are relative to the user's folder."""
    (runner.root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    changes = {
        "data": {"path": "text.txt"},
        "train": {"steps": 2, "micro_batch": "auto"},
        "schedule": {"scheme": "spipe", "passes": ["2bp"], "recompute": "full"},
    }
    config = runner.configure("tuned", changes)
    (runner.root / "elsewhere").mkdir()
    command = [sys.executable, "-m", "penstock.client.main", "tune", config.name, "--json"]
    tuned = subprocess.run(
        [*command, "--out", "elsewhere/tuned.yaml"],
        cwd=runner.root,
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    best = json.loads(tuned.stdout)["outcomes"][0]
    out = runner.root / "elsewhere" / "tuned.yaml"
    assert yaml.safe_load(out.read_text())["data"]["path"] == str(runner.root / "text.txt")
    run_dir = runner.train(out)
    run = RunDirectory(run_dir)
    assert run.config.train.micro_batch == best["micro_batch"]
    assert run.plan.scheme.startswith(best["scheme"])
    assert run.config.schedule.recompute == best["recompute"]
    assert list(run.config.schedule.passes) == best["passes"]
    assert [line["step"] for line in H.metrics(run_dir)] == [1, 2]
