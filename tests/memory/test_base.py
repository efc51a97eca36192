"""The base: frozen tensors are written once, referred to by every saved state, and checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from safetensors.numpy import load_file, save_file

from penstock.daemons.memory import effects, saving, snapshot
from penstock.daemons.memory.disk import Disk
from penstock.daemons.memory.machine.events import (
    ReplicaSource,
    Restored,
    StartRestore,
    WrittenFile,
)
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.refill import Partner
from penstock.daemons.memory.restore import Filling, restore
from penstock.daemons.memory.tensorfile import CancelledError
from penstock.host.errors import CapacityError, StateError
from penstock.models.checkpoints.export import saved_blocks
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.sockets import OPEN
from penstock.shm.control import CommitRecord
from penstock.shm.memory import NodeMemory

CORES = [min(os.sched_getaffinity(0))]


def never() -> bool:
    return False


def no_loader(cancelled: Callable[[], bool]) -> None:
    raise AssertionError("a saved state needs no loader")


@pytest.fixture
def filled(memory: NodeMemory, helpers: Any) -> NodeMemory:
    """Version 7."""
    helpers.fill(memory)
    helpers.commit(memory, 7)
    return memory


@pytest.fixture
def write(filled: NodeMemory, tmp_path: Path, helpers: Any) -> Callable[..., Path]:
    """Saves version 7 under any name; returns the folder."""

    def write(name: str, **options: Any) -> Path:
        directory = tmp_path / "state" / name
        files = saving.save(PinnedVersion(filled, 7), directory, never, **options)
        helpers.manifest(filled, directory, 7, files)
        return directory

    return write


def load(memory: NodeMemory, source: Path) -> None:
    filling = Filling(incarnation=3, version=7, source=source)
    restore(memory, filling, no_loader, never, CORES)


def files_of(state: Path) -> dict[Path, tuple[int, int]]:
    """Inodes and times of the base's files."""
    stats = {path: path.stat() for path in sorted((state.parent / "base").iterdir())}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


class Counting(Disk):
    """Notes the names of all files that are written."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def create(self, path: Path) -> Any:
        self.names.append(path.name)
        return super().create(path)


BLOCKS = [snapshot.block_file(block) for block in range(3)]
BASES = [f"base-{block:04d}" for block in range(3)]


def test_a_second_save_writes_what_is_trained(
    filled: NodeMemory, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[int, WrittenFile] = {}
    first, second = Counting(), Counting()
    before = files_of(write("step-00000006", base=known, disk=first))
    monkeypatch.setattr(saving, "digest_of", None)  # no frozen tensor is read again
    state = write("step-00000007", base=known, disk=second)
    assert sorted(first.names) == BASES + BLOCKS
    assert sorted(second.names) == BLOCKS
    assert files_of(state) == before and len(before) == 3
    assert sum(f.stat().st_size for f in state.glob("block-*")) == sum(
        entry.num_bytes for entry in snapshot.read_manifest(state).files.values()
    )
    assert not [
        name for file in state.glob("block-*") for name in load_file(file) if "froz" in name
    ]
    frozen = {b: bytes(filled.raw((b, "frozen", 0, 0))) for b in range(3)}
    for block in range(3):
        filled.raw((block, "frozen", 0, 0))[:] = b"\0" * len(frozen[block])
    load(filled, state)
    for block in range(3):
        assert bytes(filled.raw((block, "frozen", 0, 0)))[:6] == frozen[block][:6]


def test_a_new_process_finds_the_base_by_its_digest(
    filled: NodeMemory, write: Callable[..., Path]
) -> None:
    disk = Counting()
    before = files_of(write("step-00000006"))
    state = write("step-00000007", disk=disk)
    assert sorted(disk.names) == BLOCKS and files_of(state) == before
    filled.frozen(1)[0] ^= 1
    disk = Counting()
    state = write("step-00000008", disk=disk)
    assert sorted(disk.names) == [BASES[1], *BLOCKS], "other content has another name"
    assert files_of(state).items() > before.items()
    assert len(files_of(state)) == 4


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 9)])
def test_a_lost_file_of_the_base_is_written_again(
    filled: NodeMemory, write: Callable[..., Path], damage: Callable[[Path], None], known: bool
) -> None:
    base: dict[int, WrittenFile] = {}
    state = write("step-00000006", base=base)
    path = sorted(files_of(state))[1]
    content = path.read_bytes()
    damage(path)
    with pytest.raises(
        StateError, match=f"base/{path.name}: (is not there; the folder base|has 9)"
    ):
        load(filled, state)
    write("step-00000007", base=base if known else {})
    assert path.read_bytes() == content
    load(filled, state)


def test_a_changed_file_of_the_base_is_named_and_nothing_is_touched(
    filled: NodeMemory, write: Callable[..., Path]
) -> None:
    state = write("step-00000007")
    path = sorted(files_of(state))[2]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    filled.state(0, "master")[0] = 5.0
    with pytest.raises(StateError, match=f"base/{path.name}: its checksum does not match"):
        load(filled, state)
    assert filled.state(0, "master")[0] == 5.0 and filled.control.incarnation == 1


def test_a_state_without_its_base_names_the_missing_file(
    filled: NodeMemory, write: Callable[..., Path], tmp_path: Path
) -> None:
    state = write("step-00000007")
    alone, run = tmp_path / "alone" / "step-00000007", tmp_path / "copied"
    shutil.copytree(state, alone)
    message = r"alone/base/block-000\d-[0-9a-f]{16}\.safetensors: is not there; the folder base"
    with pytest.raises(StateError, match=message):
        load(filled, alone)
    with pytest.raises(StateError, match=r"alone/base/block-0001-.*No such file"):
        saved_blocks(alone, filled.spec.table)(1)
    shutil.copytree(state.parent, run)
    load(filled, run / "step-00000007")
    assert snapshot.compare(state, run / "step-00000007", filled.spec.table.blocks) == ()


def as_before(state: Path, target: Path) -> None:
    """Writes a state as an older Penstock did, with the safetensors library: of format 1, and with
    all tensors of a block in one file.
    """
    target.mkdir(parents=True)
    fields = json.loads((state / "manifest.json").read_text())
    files = {}
    for block, name in enumerate(BLOCKS):
        [base] = (state.parent / "base").glob(f"block-{block:04d}-*")
        tensors = load_file(state / name) | load_file(base)
        save_file(tensors, target / name)
        content = (target / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": snapshot.sha256_of(target / name, never)}
    del fields["base"]
    (target / "manifest.json").write_text(json.dumps(fields | {"format": 1, "files": files}))


def test_states_of_an_older_penstock_are_read(
    make_run: Any, helpers: Any, tmp_path: Path, write: Callable[..., Path]
) -> None:
    """safetensors reads no bf16 into NumPy, so the weights are fp16 here."""
    run: RunDirectory = make_run(dtype=snapshot.DType.FP16)
    memory = NodeMemory.create(run.memory_spec(0))
    try:
        helpers.fill(memory)
        helpers.commit(memory, 7)
        state, old = tmp_path / "new" / "step-00000007", tmp_path / "old" / "step-00000007"
        helpers.manifest(memory, state, 7, saving.save(PinnedVersion(memory, 7), state, never))
        as_before(state, old)
        assert snapshot.read_manifest(old).base == {} and not (old.parent / "base").exists()
        assert snapshot.compare(state, old, memory.spec.table.blocks) == ()
        read = saved_blocks(old, memory.spec.table), saved_blocks(state, memory.spec.table)
        one, other = (blocks(2)["b2.f"].tobytes() for blocks in read)
        assert one == other
        frozen = bytes(memory.raw((2, "frozen", 0, 0)))[:6]
        memory.frozen(2)[:] = 0
        load(memory, old)
        assert bytes(memory.raw((2, "frozen", 0, 0)))[:6] == frozen
        memory.frozen(2)[:] = 0
        snapshot.load_frozen(memory, old, 7, never)
        assert bytes(memory.raw((2, "frozen", 0, 0)))[:6] == frozen
    finally:
        memory.close()


def test_frozen_tensors_alone_come_from_a_saved_state(
    filled: NodeMemory, write: Callable[..., Path]
) -> None:
    """A refill from a partner needs no more: the partner has the masters."""
    state = write("step-00000007")
    expected = bytes(filled.raw((0, "frozen", 0, 0)))[:6]
    filled.frozen(0)[:] = 0
    filled.state(0, "master")[0] = 5.0
    snapshot.load_frozen(filled, state, 7, never)
    assert bytes(filled.raw((0, "frozen", 0, 0)))[:6] == expected
    assert filled.state(0, "master")[0] == 5.0
    with pytest.raises(CancelledError):
        snapshot.load_frozen(filled, state, 7, lambda: True)


@pytest.mark.parametrize("saved", [True, False])
def test_a_refill_takes_frozen_tensors_from_the_base_if_there_is_one(
    filled: NodeMemory,
    write: Callable[..., Path],
    tmp_path: Path,
    saved: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder of the model is read only before the first save. A damaged state is left out."""
    write("step-00000007" if saved else ".tmp-step-00000007")
    (write("step-00000008") / "manifest.json").write_text("{")
    expected = bytes(filled.raw((2, "frozen", 0, 0)))[:6]
    filled.frozen(2)[:] = 0
    loaded: list[str] = []

    def load(*arguments: Any) -> None:
        arguments[5](never)

    monkeypatch.setattr(effects, "refill", load)
    stub: Any = None
    jobs = effects.JobThread()
    memoryd = effects.MemoryEffects(
        memory=filled,
        link=stub,
        metrics=MemoryMetrics(CollectorRegistry()),
        load_initial=lambda cancelled: loaded.append("folder"),
        cores=CORES,
        jobs=jobs,
        state_dir=tmp_path / "state",
        partner=Partner(node="b", run_id="", access=OPEN),
    )
    source = ReplicaSource(address="", record=CommitRecord.of_restore(7, 1), generation=2)
    memoryd.carry_out([StartRestore(incarnation=1, source="", version=7, replica=source)])
    jobs.join()
    assert jobs.answer() == Restored()
    assert loaded == ([] if saved else ["folder"])
    assert (bytes(filled.raw((2, "frozen", 0, 0)))[:6] == expected) is saved


@pytest.mark.parametrize("how", ["full", "cancelled"])
def test_a_base_that_cannot_be_written_leaves_nothing(
    filled: NodeMemory, tmp_path: Path, how: str
) -> None:
    cancelled = False

    class Failing(Disk):
        def create(self, path: Path) -> Any:
            nonlocal cancelled
            if path.name == BASES[1]:
                if how == "full":
                    raise OSError(28, "No space left on device", str(path))
                cancelled = True
            return super().create(path)

    directory = tmp_path / "state" / ".tmp-step-00000007"
    with pytest.raises(CapacityError if how == "full" else CancelledError):
        saving.save(PinnedVersion(filled, 7), directory, lambda: cancelled, disk=Failing())
    assert list(directory.iterdir()) == []
    assert not (tmp_path / "state" / "base").exists()
    assert [filled.control.pin(block) for block in range(3)] == [None] * 3


def test_training_goes_on_while_the_base_is_written(filled: NodeMemory, tmp_path: Path) -> None:
    pins: list[int | None] = []

    class Watching(Disk):
        def create(self, path: Path) -> Any:
            if path.name in BASES:
                pins.extend(filled.control.pin(block) for block in range(3))
            return super().create(path)

    saving.save(PinnedVersion(filled, 7), tmp_path / "state" / "s", never, disk=Watching())
    assert pins == [None] * 9


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.daemons.memory import saving
from penstock.daemons.memory.disk import Disk
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.memory import NodeMemory

run_dir, directory, instant = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

class Mortal(Disk):
    calls = 0

    def _call(self):
        Mortal.calls += 1
        if Mortal.calls == instant:
            os.kill(os.getpid(), signal.SIGKILL)

def mortal(name):
    def call(self, *arguments):
        self._call()
        result = getattr(Disk, name)(self, *arguments)
        self._call()
        return result
    return call

for name in ("create", "write", "sync", "sync_names", "rename", "make_directory"):
    setattr(Mortal, name, mortal(name))

memory = NodeMemory.attach(RunDirectory(run_dir).memory_spec(0))
saving.save(PinnedVersion(memory, 7), directory, lambda: False, disk=Mortal())
memory.close()
print(Mortal.calls)
"""


def test_a_kill_at_any_call_leaves_whole_files_and_the_next_save_goes_on(
    make_run: Any, helpers: Any, tmp_path: Path
) -> None:
    """Before and after each call of the disk, from the first file of the base on."""
    run: RunDirectory = make_run()
    memory = NodeMemory.create(run.memory_spec(0))

    def save(state: Path, instant: int) -> subprocess.CompletedProcess[str]:
        directory = state / ".tmp-step-00000007"
        words = [sys.executable, "-c", KILLED, str(run.path), str(directory), str(instant)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    try:
        helpers.fill(memory)
        helpers.commit(memory, 7)
        undisturbed = save(tmp_path / "undisturbed", 0)
        calls = int(undisturbed.stdout)
        whole = {p.name: p.read_bytes() for p in (tmp_path / "undisturbed/base").iterdir()}
        # The order of threads differs, so instants are drawn over the whole save.
        for instant in range(calls, 1, -max(1, calls // 10)):
            state = tmp_path / str(instant)
            assert save(state, instant).returncode == -9, instant
            kept = {path.name: path.read_bytes() for path in state.glob("base/*")}
            assert kept.items() <= whole.items()
            directory = state / ".tmp-step-00000007"
            files = saving.save(PinnedVersion(memory, 7), directory, never)
            reused = {file.name for file in files if file.reused}
            assert reused == kept.keys(), "what is there is not written again"
            assert {path.name: path.read_bytes() for path in state.glob("base/*")} == whole
    finally:
        memory.close()
