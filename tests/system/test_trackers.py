"""A run whose trackers hang and raise ends on time, with the bytes of one without any."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import PLAIN, merge, metrics, state_bytes

HANGING = "import time\n\ndef init(**_): time.sleep(1e6)\n\ndef Settings(**_): ...\n"
RAISING = """class Run:
    def log(self, *_, **__): raise ValueError('no')
    def finish(self): raise ValueError('no')

def init(**_): return Run()
"""


@pytest.mark.slow
def test_trackers_neither_change_nor_hold_up_a_run(
    runner: Any, plain_run: Path, tmp_path: Path
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(HANGING)
    (packages / "trackio.py").write_text(RAISING)
    changes = {"observability": {"trackers": ["tensorboard", "wandb", "trackio"]}}
    config = runner.configure("tracked", merge(PLAIN, changes))
    run = runner.start(config, env={"PYTHONPATH": str(packages)})
    code, output = run.wait(500)
    ended_s = time.time()
    assert code == 0, output
    assert ended_s - (run.run_dir / "metrics.jsonl").stat().st_mtime < 20.0
    assert state_bytes(run.run_dir) == state_bytes(plain_run)
    assert [m["loss"] for m in metrics(run.run_dir)] == [m["loss"] for m in metrics(plain_run)]
    assert any((run.run_dir / "tensorboard").iterdir())
    said = (run.run_dir / "logs" / "observerd.jsonl").read_text()
    assert "wandb did not end in time; it was killed" in said
    assert "trackio ended with exit code 4" in said
