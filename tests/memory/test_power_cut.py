"""Power cut at every write, sync and rename of a save: always a valid older or newer state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.daemons.memory import saving
from penstock.daemons.memory.disk import DISK, Disk
from penstock.daemons.memory.machine.events import WrittenFile
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.states import verify
from penstock.daemons.scheduler.machine.events import CompleteSave
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.saved import SavedStates
from penstock.host.errors import StateError
from penstock.shm.memory import NodeMemory
from tests.memory.power import PowerCut, RecordingDisk

DRAWN = 4
"""So many random outcomes of each prefix, beside the best and the worst."""


def saved_states(memory: NodeMemory, state_dir: Path, disk: Disk = DISK) -> SavedStates:
    table = memory.spec.table
    return SavedStates(
        state_dir,
        run_id=memory.spec.run_id,
        table_digest=table.digest,
        num_blocks=len(table.blocks),
        keep=1,
        disk=disk,
    )


def listed(files: tuple[WrittenFile, ...], *, base: bool) -> tuple[tuple[str, int, str], ...]:
    return tuple((f.name, f.num_bytes, f.sha256) for f in files if f.base is base)


def save(memory: NodeMemory, state_dir: Path, version: int, disk: Disk = DISK) -> None:
    """What memoryd and scheduler do."""
    states = saved_states(memory, state_dir, disk)
    directory = state_dir / f".tmp-step-{version:08d}"
    states.prepare(directory)
    files = saving.save(PinnedVersion(memory, version), directory, lambda: False, disk=disk)
    states.complete(
        CompleteSave(
            number=1,
            version=version,
            directory=str(directory),
            files=listed(files, base=False),
            base=listed(files, base=True),
            position=Position(version=version, data_position=8 * version, loss_scale=1.0),
            attempt=version,
        )
    )


@pytest.mark.parametrize("version", [9, 7], ids=["a newer step", "the same step again"])
def test_a_power_cut_leaves_the_older_state_or_the_newer(
    memory: NodeMemory, tmp_path: Path, helpers: Any, version: int
) -> None:
    state_dir = tmp_path / "state"
    helpers.fill(memory)
    helpers.commit(memory, 7)
    save(memory, state_dir, 7)
    memory.state(1, "exp_avg")[:3] = 7.0
    helpers.commit(memory, version)
    cut, disk = PowerCut(state_dir), RecordingDisk()
    save(memory, state_dir, version, disk)
    fate, found = random.Random(version), []
    for number, operation in enumerate((None, *disk.operations)):
        if operation is not None:
            cut.perform(operation)
        for draw in range(-2, DRAWN):
            left = tmp_path / f"{number}.{draw}"
            cut.leave(left, fate if draw >= 0 else None, lost=draw == -2)
            found.append(what_is_left(memory, left))
    newest = [version for version, _ in found]
    assert newest[0] == 7
    assert newest[-1] == version
    assert len(disk.operations) > 15
    assert {changed for _, changed in found} == {False, True}, "the older one, then the newer"


def what_is_left(memory: NodeMemory, left: Path) -> tuple[int, bool]:
    """Start anew: returns the version of the newest state, every byte of which is checked, and
    whether it is the second one that was saved.
    """
    states = saved_states(memory, left)
    states.remove_temporary()
    newest = states.newest()
    assert newest is not None, f"nothing is left in {left}"
    directory = Path(newest.directory)
    verify(directory, newest.version, memory.spec.table)
    assert [path.name for path in left.iterdir() if path.name.startswith(".")] == []
    content = (directory / "block-0001.safetensors").read_bytes()
    return newest.version, b"\x00\x00\xe0@" * 3 in content


@pytest.mark.parametrize("moment", ["of the first save", "of a save that misses the base"])
def test_a_power_cut_while_the_base_is_written_leaves_no_half_file(
    memory: NodeMemory, tmp_path: Path, helpers: Any, moment: str
) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    helpers.fill(memory)
    helpers.commit(memory, 7)
    older = moment != "of the first save"
    if older:
        save(memory, state_dir, 7)
        for path in (state_dir / "base").iterdir():
            path.unlink()
        helpers.commit(memory, 8)
    cut, disk = PowerCut(state_dir), RecordingDisk()
    save(memory, state_dir, 7 + older, disk)
    whole = {path.name: path.read_bytes() for path in (state_dir / "base").iterdir()}
    assert len(whole) == 3
    fate, outcomes = random.Random(moment), set()
    for number, operation in enumerate((None, *disk.operations)):
        if operation is not None:
            cut.perform(operation)
        for draw in range(-2, DRAWN):
            left = tmp_path / f"{number}.{draw}"
            cut.leave(left, fate if draw >= 0 else None, lost=draw == -2)
            kept = {path.name: path.read_bytes() for path in left.glob("base/*")}
            assert kept.items() <= whole.items()
            states = saved_states(memory, left)
            states.remove_temporary()
            assert not list(left.glob(".*"))
            try:
                newest = states.newest()
            except StateError as error:
                assert older and "base" in str(error) and len(kept) < 3
                continue
            outcomes.add(newest.version if newest else None)
            if newest is not None:
                verify(Path(newest.directory), newest.version, memory.spec.table)
    assert outcomes == ({7, 8} if older else {None, 7}), "written again, the base serves both"
