"""A run directory's own configuration goes on with that run, wherever the directory was moved or
copied to; memory of the run goes with the directory that it belongs to.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.client.main import app
from penstock.daemons.node.run_lock import settle_home
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.segment import exists, unlink
from tests.client.test_doctor import make_dead


def train(run: Path, *more: str) -> tuple[int, str]:
    """``penstock train RUN/resolved.yaml`` of a finished run, which starts nothing."""
    result = CliRunner().invoke(app, ["train", str(run / "resolved.yaml"), *more])
    return result.exit_code, result.output


@pytest.fixture
def first(plain_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run that has had a start in its own place. A start that finds nothing to
    do writes nothing, so the test settles the place.
    """
    run = shutil.copytree(plain_run, tmp_path / "first")
    assert train(run)[0] == 0
    settle_home(RunDirectory(run))
    return run


def test_a_run_directorys_configuration_goes_on_with_that_run(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = "all 40 steps are done and saved"
    assert train(first) == (
        0,
        f"{first}: {done}; raise train.steps to continue, or choose another run.dir\n",
    )
    second = shutil.copytree(first, tmp_path / "second")
    shutil.move(first, tmp_path / "moved")
    for run in (second, tmp_path / "moved"):
        code, said = train(run)
        assert code == 0 and said.startswith(f"{run}: {done}")
        assert penstock.train(run / "resolved.yaml").run_dir == run
    assert train(second, "--run-dir", str(tmp_path / "moved"))[1].startswith(f"{tmp_path}/moved: ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moved", "second"]


def test_memory_belongs_to_the_directory_that_was_copied(first: Path, tmp_path: Path) -> None:
    run_id = json.loads((first / "run.json").read_text())["run_id"]
    second = shutil.copytree(first, tmp_path / "second")
    name = make_dead(run_id)
    try:
        code, said = train(second)
        assert code == 2
        assert f"{second}: is a copy of {first}, and run {run_id} has step 17 in memory" in said
        assert f"penstock train {first}/resolved.yaml" in said
        result = CliRunner().invoke(app, ["doctor", "--run-dir", str(second)])
        assert f"belongs to {first}, of which {second} is a copy" in result.output
        clean = ["doctor", "--clean", "--force", "--run-dir", str(second)]
        assert CliRunner().invoke(app, clean).exit_code == 0 and exists(name)
    finally:
        unlink(name)
    assert train(second)[0] == 0
