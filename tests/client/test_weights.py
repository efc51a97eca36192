"""Folders of copies of weights and of exports: replaced ones, refused ones, and remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from penstock.client.export import appearing, check_output
from penstock.client.main import app
from penstock.client.weights.copying import WeightsCopy
from penstock.client.weights.folder import (
    INDEX,
    NOTE,
    Note,
    complete,
    listing,
    name_step,
    older_copy,
    unfinished,
)
from penstock.host import files
from penstock.host.errors import CapacityError, ConfigError, LostMemberError, PenstockError

KILLED = """
import os, sys
from pathlib import Path
from penstock.client.weights.folder import unfinished
with unfinished(Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), 9)
"""


def copy(target: Path, step: int, **contents: str) -> None:
    """Puts a copy of a step into the folder, as the command does."""
    with unfinished(target) as folder:
        for name, content in contents.items():
            (folder / name).write_text(content)
        note = Note(
            run_id="ab",
            run_name="tiny",
            step=step,
            form="hf",
            dtype="bf16",
            files=listing(folder),
        )
        complete(folder, target, note)


def test_a_copy_appears_and_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "copy"
    copy(target, 3, config="three", old="3")
    assert older_copy(target) == Note(
        run_id="ab", run_name="tiny", step=3, form="hf", dtype="bf16", files={"config": 5, "old": 1}
    )
    folder = os.open(target, os.O_RDONLY)
    with (target / "config").open() as opened:
        copy(target, 4, config="four")
        assert opened.read() == "three", "an open file stays that of its step"
    assert listing(target).keys() == {"config", NOTE}
    assert (target / "config").read_text() == "four"
    with pytest.raises(FileNotFoundError):
        os.open("config", os.O_RDONLY, dir_fd=folder)  # of the older folder: missed, never mixed
    os.close(folder)
    assert [path.name for path in target.parent.iterdir()] == ["copy"]


def test_an_empty_folder_and_a_link_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    copy(tmp_path / "empty", 1, config="one")
    assert (tmp_path / "empty" / "config").read_text() == "one"


@pytest.mark.parametrize("kind", ["file", "foreign", "note", "more", "deep"])
def test_what_the_command_did_not_write_stays(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    messages = {
        "file": "a file is there",
        "foreign": "is not empty, and penstock weights did not write it",
        "note": "a damaged one",
        "more": "has 'mine.txt', which penstock weights did not write",
        "deep": "has 'deep/mine.txt', which penstock weights did not write",
    }
    if kind == "file":
        target.write_text("mine")
    elif kind == "foreign":
        target.mkdir()
        (target / "config.json").write_text("{}")
    else:
        copy(target, 3, config="three")
        place = {"note": NOTE, "more": "mine.txt", "deep": "deep/mine.txt"}[kind]
        (target / place).parent.mkdir(exist_ok=True)
        (target / place).write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(ConfigError, match=messages[kind]):
        copy(target, 4, config="four")
    assert listing(tmp_path) == before


def test_what_a_killed_command_left_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy(target, 3, config="three")
    result = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert result.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2 and older_copy(target) is not None
    with unfinished(target) as live:  # of a command that is at work
        copy(target, 4, config="four")
        assert live.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_an_error_leaves_the_older_copy(tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy(target, 3, config="three")
    with pytest.raises(KeyboardInterrupt), unfinished(target) as folder:
        (folder / "config").write_text("half")
        raise KeyboardInterrupt
    assert (target / "config").read_text() == "three"
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_killed_export_leaves_nothing(tmp_path: Path) -> None:
    """The tool is killed in the midst of its own temporary folder."""
    target = tmp_path / "new" / "out"
    with pytest.raises(KeyboardInterrupt), appearing(target) as folder:
        (folder.parent / ".files.7.tmp").mkdir()
        (folder.parent / ".files.7.tmp" / "half").write_text("half")
        raise KeyboardInterrupt
    assert listing(tmp_path) == {}


def test_a_stop_signal_ends_an_export_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_signals: None
) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    monkeypatch.setattr(
        "penstock.client.export.export", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out")])
    assert "penstock: interrupted" in result.output and result.exit_code


@pytest.mark.parametrize("error", [CapacityError("no room"), LostMemberError("late")])
def test_errors_of_exchanges_have_one_exit_code_and_are_json(
    error: PenstockError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error.report = {"problems": ["missing"]}
    config = tmp_path / "run.yaml"
    config.write_text("model: {hf: {model_type: llama}}\ndata: {path: text.txt}\n")
    for function, words in (
        ("export.export", ["export", tmp_path, tmp_path / "out"]),
        ("exchange.inspection.inspect", ["inspect", tmp_path]),
        ("exchange.imports.check", ["import", tmp_path, "--config", config, "--run-dir", tmp_path]),
    ):
        monkeypatch.setattr(f"penstock.client.{function}", mock.Mock(side_effect=error))
        options = ["--dry-run"] if words[0] == "import" else []
        for extra in ([], ["--json"]):
            result = CliRunner().invoke(app, [*map(str, words), *options, *extra])
            assert result.exit_code == 2 and f"penstock: {error}" in result.stderr
            report = json.dumps({**error.report, "error": str(error)}, indent=1) + "\n"
            assert result.stdout == (report if extra else "")


def test_an_export_follows_links_and_takes_an_empty_folder(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "place"
    for link in ("dangling", "to an empty folder"):
        (tmp_path / link).symlink_to(place)
        check_output(run, tmp_path / link)
        with appearing(tmp_path / link) as folder:
            (folder / "a").write_text(link)
        assert (place / "a").read_text() == link and (tmp_path / link).is_symlink()
        (place / "a").unlink()


def test_places_that_an_export_must_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file = tmp_path / "run", tmp_path / "file"
    (run / "state" / "step-00000003").mkdir(parents=True)
    file.write_text("mine")
    for place, words in (
        (file, "is a file; give a new directory"),
        (run, "exists and is not empty"),
        (run / "state" / "step-00000009", "which has the run's saved states"),
        (run / "state" / "step-00000003" / "out", "which has the run's saved states"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_output(run, place)
    check_output(run, run / "export")
    (run / "export").mkdir()
    monkeypatch.chdir(run / "export")  # a shell would stay in the folder that is replaced
    with pytest.raises(ConfigError, match="is the current directory"):
        check_output(run, Path())


def test_a_file_system_that_cannot_exchange(tmp_path: Path, monkeypatch: Any) -> None:
    target = tmp_path / "copy"
    copy(target, 3, config="three")
    monkeypatch.setattr(files, "_RENAME_EXCHANGE", 1 << 20)  # the kernel knows no such flag
    with pytest.raises(ConfigError, match="cannot exchange two folders in one call; remove"):
        copy(target, 4, config="four")
    assert (target / "config").read_text() == "three"
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_names_of_several_files_contain_the_step(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        (tmp_path / name).write_text(name)
    index = {"metadata": {"total_size": 2}, "weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    name_step(tmp_path, 120)
    renamed = [f"model-step120-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert listing(tmp_path).keys() == {*renamed, INDEX}
    read = json.loads((tmp_path / INDEX).read_text())
    assert read == {
        "metadata": {"total_size": 2},
        "weight_map": {"a": renamed[0], "b": renamed[1]},
    }
    assert [(tmp_path / name).read_text() for name in renamed] == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --latest; penstock export"),
        (["--latest", "--format", "dcp"], "--format dcp: accepted are"),
        (["--latest", "--dtype", "int8"], "--dtype int8: accepted are"),
        (["--latest"], "no run directory"),
    ],
)
def test_refusals(words: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["weights", str(tmp_path), "--to", str(tmp_path / "x"), *words]
    )
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_copy_among_saved_states_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "state" / "step-00000009"
    words = ["weights", str(tmp_path), "--latest", "--to", str(place)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "which has the run's saved states" in " ".join(result.stderr.split())


def test_the_lines_for_the_user() -> None:
    result = WeightsCopy(
        step=12,
        directory="/to",
        format="hf",
        dtype="bf16",
        bytes=3_000_000,
        files=["a", "b"],
        replaced_step=7,
        seconds=9.0,
        copy_seconds=1.5,
        converted="",
    )
    assert result.to_text(Path("runs/tiny")) == (
        "the weights of step 12 of runs/tiny are in /to, in the place of those of step 7\n"
        "3.0 MB (bf16) in 2 files in 9.0 s, of which memory was copied for 1.5 s (2 MB/s)"
    )
