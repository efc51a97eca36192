"""Projects that were moved or copied: paths are places, their content is what a run keeps."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from penstock.config.schema import load_config
from penstock.daemons.node.preparing.prepare import prepare_run
from penstock.host.errors import ConfigError
from tests.folders import TEXT, save_model

RUN = Path("runs/p")


@pytest.fixture(scope="module", params=["path", "tokens"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with relative paths, whose run has started."""
    folder = tmp_path_factory.mktemp("projects") / "here"
    folder.mkdir()
    save_model(folder / "base", "gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=64)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(TEXT)
    np.arange(600, dtype=np.uint16).__mod__(200).tofile(folder / "tokens.bin")
    data = {"path": "text"} if request.param == "path" else {"tokens": "tokens.bin"}
    fields = {
        "run": {"name": "p", "dir": str(RUN)},
        "model": {"path": "base"},
        "data": {**data, "sequence_length": 16},
        "train": {"steps": 2, "global_batch": 4},
    }
    (folder / "p.yaml").write_text(yaml.safe_dump(fields))
    prepare(folder)
    (folder / RUN / "journal.sqlite").touch()
    return folder


@pytest.fixture
def project(prepared: Path) -> Iterator[Path]:
    """The project for one test, at the path where its run was prepared."""
    kept = prepared.rename(prepared.with_name("kept"))
    shutil.copytree(kept, prepared)
    yield prepared
    shutil.rmtree(prepared, ignore_errors=True)
    shutil.rmtree(prepared.with_name("there"), ignore_errors=True)
    kept.rename(prepared)


def news(lines: list[str]) -> list[str]:
    """Returns lines without the one of each start."""
    return [line for line in lines if not line.startswith("trains all ")]


def prepare(folder: Path, config: str = "p.yaml", *overrides: str) -> list[str]:
    """Returns the lines of a preparation that started in ``folder``."""
    lines: list[str] = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        prepare_run(load_config(Path(config), overrides), folder / RUN, lines.append)
    finally:
        os.chdir(before)
    return lines


def inputs(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Returns times and content of what was made from the inputs, but for the tokens' place."""
    paths = [folder / RUN / "table.json", folder / RUN / "model" / "config.json"]
    paths += (folder / RUN / "data").glob("train.*")
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


@pytest.mark.parametrize("way", ["moved", "copied", "without a record"])
def test_a_project_goes_on_at_another_path(project: Path, way: str) -> None:
    before, there = inputs(project), project.with_name("there")
    shutil.copytree(project, there, symlinks=True)
    if way != "copied":
        shutil.rmtree(project)
    if way == "without a record":
        (there / RUN / "places.json").unlink()
    times = {name: entry[0] for name, entry in before.items()}
    for name, time_ns in times.items():
        for path in (there / RUN).rglob(name):
            os.utime(path, ns=(time_ns, time_ns))
    for path in (there / "text" / "a.txt", there / "tokens.bin"):
        os.utime(path, ns=(1, 1))
    lines = prepare(there)
    assert [line for line in lines if "the same content at other paths" in line], lines
    assert not [line for line in lines if "changed" in line or "preparing" in line], lines
    assert inputs(there) == before
    resolved = (there / RUN / "resolved.yaml").read_text()
    assert f"{project}/" not in resolved and str(there) in resolved
    meta = json.loads((there / RUN / "data" / "meta.json").read_text())
    assert str(project) not in json.dumps(meta["train"]["path"])
    assert not news(prepare(there)), "once is enough"


def test_the_runs_own_configuration_follows_the_move(project: Path) -> None:
    there = project.rename(project.with_name("there"))
    lines = prepare(there, str(RUN / "resolved.yaml"))
    assert [line for line in lines if "the same content at other paths" in line], lines
    assert f"{project}/" not in (there / RUN / "resolved.yaml").read_text()
    assert not news(prepare(there, str(RUN / "resolved.yaml")))


def test_a_run_goes_on_without_the_folders_that_it_began_with(project: Path) -> None:
    there = project.rename(project.with_name("there"))
    shutil.rmtree(there / "base")
    assert [line for line in prepare(there) if "model.path" in line]


def test_other_content_is_refused(project: Path) -> None:
    key = "path" if "path: text" in (project / "p.yaml").read_text() else "tokens"
    other = {"path": "text", "tokens": "tokens.bin"}[key]
    there = project.rename(project.with_name("there"))
    if key == "path":
        (there / other / "a.txt").write_text(TEXT.replace("water", "sand!"))
    else:
        np.arange(600, dtype=np.uint16).__mod__(190).tofile(there / other)
    before = inputs(there)
    with pytest.raises(ConfigError, match=rf"data\.{key}: .*the run's place in the data"):
        prepare(there)
    assert inputs(there) == before


def test_a_model_folder_is_compared_by_what_a_run_reads(project: Path) -> None:
    there = project.rename(project.with_name("there"))
    (there / "base" / "README.md").write_text("A model.")
    assert news(prepare(there))
    there = there.rename(project)
    weights = there / "base" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"model\.path: .*the saved state belongs to the old model"
    ):
        prepare(there)
