"""What the simulated disk of saved states keeps in a power cut."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.host.files import no_room
from tests.simulation.disk import Disk
from tests.simulation.files import Files, replace_files
from tests.simulation.history import History
from tests.simulation.kernel import Kernel, Machine, Process


class Scene:
    """A disk, and a process on each of two machines that writes to it."""

    def __init__(self, path: Path) -> None:
        self.kernel = Kernel(0)
        history = History(self.kernel)
        self.disk = Disk(self.kernel, history)
        self.files = Files(path, self.kernel, history, self.disk)
        self.here, self.there = (
            Process(self.kernel, Machine(name), f"memoryd.{name}", 1) for name in "ab"
        )
        self.state = path / "state"
        self.state.mkdir()

    def write(self, process: Process, path: Path, *, sync: bool = True) -> None:
        with self.files.create(process, path) as file:
            self.files.write(process, file, b"content")
            if sync:
                self.files.sync(process, file)

    def cut(self, fate: int) -> None:
        self.files.power_cut(self.here.machine, random.Random(fate), hosts=True)


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    scene = Scene(tmp_path)
    yield scene
    scene.disk.unmount()


def test_what_was_not_synced_goes_with_its_machine_alone(scene: Scene) -> None:
    synced, own, other = (scene.state / "temporary" / name for name in "abc")
    own.parent.mkdir()
    scene.write(scene.here, synced)
    scene.files.sync_names(scene.here, own.parent)
    scene.write(scene.there, other, sync=False)
    left = set()
    for fate in range(20):
        scene.write(scene.here, own, sync=False)
        scene.cut(fate)
        left.add(own.read_bytes() if own.exists() else None)
        own.unlink(missing_ok=True)
        assert synced.read_bytes() == other.read_bytes() == b"content"
    assert {None, b"", bytes(7), b"content"} <= left


def test_names_that_were_not_synced_come_back(scene: Scene) -> None:
    old, new = scene.state / "one", scene.state / "two"
    found = set()
    for fate in range(20):
        scene.files.make_directory(scene.here, old)
        scene.write(scene.here, old / "file")
        scene.files.sync_names(scene.here, old)
        scene.files.sync_names(scene.here, scene.state)
        scene.files.rename(scene.here, old, new)
        scene.files.remove(scene.here, new)
        assert not old.exists() and not new.exists()
        scene.cut(fate)
        found.add(tuple((at / "file").exists() for at in (old, new)))
        for left in (at for at in (old, new) if at.exists()):
            scene.files.remove(scene.here, left)
        scene.files.sync_names(scene.here, scene.state)
    assert found == {(True, False), (False, True), (False, False)}


def test_a_state_gets_its_name_when_all_of_it_is_on_disk(scene: Scene) -> None:
    directory = scene.state / ".tmp-step-00000001"
    scene.files.make_directory(scene.here, directory)
    scene.write(scene.here, directory / "block-0000.safetensors", sync=False)
    scene.write(scene.here, directory / "manifest.json")
    scene.files.sync_names(scene.here, directory)
    scene.files.rename(scene.here, directory, scene.state / "step-00000001")
    (said,) = scene.kernel.violations
    assert "before all is on disk ['block-0000.safetensors']" in said


@pytest.mark.parametrize("fate", range(8))
def test_a_complete_state_must_outlive_a_power_cut(scene: Scene, fate: int) -> None:
    directory, named = scene.state / ".tmp-step-00000001", scene.state / "step-00000001"
    scene.files.make_directory(scene.here, directory)
    scene.write(scene.here, directory / "manifest.json")
    scene.files.sync_names(scene.here, directory)
    scene.files.sync_names(scene.here, scene.state)
    scene.files.rename(scene.here, directory, named)
    scene.files.completed(named, keep=1)
    scene.cut(fate)
    assert bool(scene.kernel.violations) is not named.exists()


def test_how_much_room_is_left_is_the_simulated_disk_s(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the real one has left is said in errors, and changes from run to run of a seed."""
    replace_files(monkeypatch.setattr)
    cluster: Any = SimpleNamespace(cluster=SimpleNamespace(files=scene.files))
    scene.here.enter(cluster)
    said = []
    for full in (True, False):
        scene.disk.full_beside = full
        said.append(str(scene.here.context.run(no_room, scene.state, 1)))
    assert " 0 are free" in said[0] and " 1,073,741,824 are free" in said[1]
