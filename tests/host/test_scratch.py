"""Folders of killed commands are removed by the next one; those of living commands stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.host.limits import scratch
from penstock.host.limits.scratch import remove_abandoned, scratch_folder

HOLD = (
    "import signal\n"
    "from penstock.host.limits.scratch import scratch_folder\n"
    "with scratch_folder('data') as folder:\n"
    "    (folder / 'rows').write_text('a')\n"
    "    print(folder, flush=True)\n"
    "    signal.pause()\n"
)


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def held() -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    process, folder = held()
    with scratch_folder("import"):
        assert (folder / "rows").is_file(), "its process lives"
    assert [*tmp_path.iterdir()] == [folder]
    end(process)
    with scratch_folder("import") as made:
        assert [*tmp_path.iterdir()] == [made]
    assert not [*tmp_path.iterdir()]


def test_other_names_links_and_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [tmp_path / "penstock-data-old", tmp_path / "other.folder"]
    for folder in kept:
        folder.mkdir()
    link = tmp_path / "penstock-data.link"
    link.symlink_to(kept[1])
    (tmp_path / "penstock-import.a.txt").write_text("an error's log")
    remove_abandoned()
    assert len([*tmp_path.iterdir()]) == 4
    strange = tmp_path / "penstock-data.strange"
    strange.mkdir()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    remove_abandoned()
    assert strange.is_dir()
    monkeypatch.undo()


def test_a_folder_that_is_removed_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command may come between the creation and the lock."""
    make, made = tempfile.mkdtemp, []

    def making(*args: str, **keys: str) -> str:
        made.append(make(*args, **keys))
        if len(made) == 1:
            remove_abandoned()
        return made[-1]

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", making)
    with scratch_folder("data") as folder:
        assert len(made) == 2 and folder == Path(made[1]) and folder.is_dir()
