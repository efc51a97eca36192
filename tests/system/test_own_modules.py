"""Modules of the user's are found beside the configuration, and hide none of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system import conftest as H

OBJECTIVE = """
from penstock.models.data.batch import MicroBatch

def halves(tokens):
    half = tokens.shape[1] // 2
    return MicroBatch(input_ids=tokens[:, :half], labels=tokens[:, 1 : half + 1])
"""
NOWHERE = ("--set", "model.import_path=../nowhere")
SHADOWS = ("random", "select", "types", "profile", "tokenizers/__init__", "statistics")
"""Names of modules that Python, torch or Penstock import."""


def train(config: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Returns how a run ended that was started from ``folder``."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    penstock = Path(sys.executable).with_name("penstock")
    command = [str(penstock), "train", str(config), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600.0
    )


def shadow(folder: Path) -> None:
    """Put modules into a folder that end each process that imports one of them."""
    for name in SHADOWS:
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"import os\nopen({str(folder / 'executed')!r}, 'a').close()\nos._exit(3)\n"
        )


@pytest.mark.parametrize("preload", [True, False], ids=["preloaded", "spawned"])
def test_files_in_the_current_folder_hide_no_module(
    runner: H.Runner, tmp_path: Path, preload: bool
) -> None:
    changes: dict[str, Any] = {"train": {"steps": 2}, "cluster": {"preload": preload}}
    config = runner.configure("shadowed", changes)
    folder = tmp_path / "work"
    folder.mkdir()
    shadow(folder)
    result = train(config, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (folder / "executed").exists()


def test_modules_lie_beside_the_configuration_and_may_move_with_it(
    runner: H.Runner, tmp_path: Path
) -> None:
    fields = yaml.safe_load(runner.configure("own", {"train": {"steps": 2}}).read_text())
    fields["data"]["objective"] = "mine:halves"
    project = tmp_path / "project"
    project.mkdir()
    shadow(project)
    (project / "mine.py").write_text(OBJECTIVE)
    config = project / "own.yaml"
    config.write_text(yaml.safe_dump(fields))
    result = train(config, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (project / "executed").exists()
    run_dir = Path(fields["run"]["dir"])
    stored = yaml.safe_load((run_dir / "resolved.yaml").read_text())["model"]["import_path"]
    assert stored == str(project)

    moved = project.rename(tmp_path / "moved")
    result = train(moved / "own.yaml", tmp_path, "--set", "train.steps=3")
    assert result.returncode == 0, result.stdout + result.stderr
    result = train(moved / "own.yaml", tmp_path, "--set", "train.steps=4", *NOWHERE)
    assert result.returncode == 2
    assert f"model.import_path = '{moved}/../nowhere'" in result.stderr, result.stderr
