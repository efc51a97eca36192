"""Copies of the weights while training goes on: bytes, pins, and refusals."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.daemons.memory.copies import copying
from penstock.daemons.memory.copies.copying import copy_weights
from penstock.daemons.memory.disk import Disk
from penstock.daemons.memory.pinning import PinnedVersion
from penstock.daemons.memory.snapshot import block_file
from penstock.daemons.memory.tensorfile import CancelledError
from penstock.host.errors import CapacityError, ConfigError, StateError
from penstock.models.checkpoints.export import saved_blocks
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.names import ownership
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.layout import NodeLayout, Storage
from penstock.shm.memory import NodeMemory
from penstock.shm.published import LAYOUT, PublishedFile, PublishedLayout, PublishedTensor
from penstock.shm.table import DType

BLOCKS = range(3)
FILES = ("one.safetensors", "two.safetensors")
Lay = Callable[..., Path]


def numbers(memory: NodeMemory, version: int) -> dict[str, torch.Tensor]:
    """The weights of all blocks in bf16, by torch."""
    tensors = {}
    for block in memory.owned_blocks():
        master = torch.from_numpy(memory.load_master(block, version))
        frozen = torch.from_numpy(memory.frozen(block).copy()).view(torch.bfloat16)
        for spec in memory.spec.table.blocks[block].tensors:
            flat = (master if spec.trainable else frozen)[spec.offset :][: spec.num_elements]
            tensors[spec.name] = flat.reshape(spec.shape).to(torch.bfloat16)
    return tensors


@pytest.fixture
def lay(tmp_path: Path) -> Lay:
    """Makes a folder with a layout: blocks 0 and 1 in one file, block 2 in the other."""

    def lay(memory: NodeMemory, name: str = "copy") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        table, files = memory.spec.table, []
        for file, blocks in zip(FILES, ((0, 1), (2,)), strict=True):
            specs = [spec for block in blocks for spec in table.blocks[block].tensors]
            empty = {s.name: torch.zeros(s.shape, dtype=torch.bfloat16) for s in specs}
            save_file(empty, folder / file)  # zeros, at the places that the library chooses
            header, places = _places(folder / file)
            tensors = tuple(
                PublishedTensor(
                    block=block,
                    source=spec.name,
                    offset=0,
                    shape=spec.shape,
                    strides=torch.empty(spec.shape).stride(),
                    dtype=DType.BF16,
                    start=header + places[spec.name],
                )
                for block in blocks
                for spec in table.blocks[block].tensors
            )
            size = (folder / file).stat().st_size
            files.append(PublishedFile(name=file, num_bytes=size, tensors=tensors))
        layout = PublishedLayout(table_digest=table.digest, files=tuple(files))
        (folder / LAYOUT).write_text(layout.to_json())
        return folder

    return lay


def _places(path: Path) -> tuple[int, dict[str, int]]:
    import json

    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    fields = json.loads(content[8 : 8 + length])
    fields.pop("__metadata__", None)
    return 8 + length, {name: entry["data_offsets"][0] for name, entry in fields.items()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in FILES for name, value in load_file(folder / file).items()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name].view(torch.int16), value.view(torch.int16)), name


def pins(memory: NodeMemory) -> list[int | None]:
    return [memory.control.pin(block) for block in BLOCKS]


def never() -> bool:
    return False


@pytest.fixture
def filled(memory: NodeMemory, helpers: Any) -> NodeMemory:
    """Version 7 with numbers that bf16 has to round; frozen bits that are no NaN."""
    helpers.fill(memory)
    for block in BLOCKS:
        memory.frozen(block)[:] &= 0x7F7F
        master = torch.from_numpy(memory.load_master(block, 7))
        memory.weights(block, 1)[:] = master.to(torch.bfloat16).view(torch.uint16).numpy()
    helpers.commit(memory, 7)
    return memory


def test_tensors_are_at_their_places(filled: NodeMemory, lay: Lay) -> None:
    folder = lay(filled)
    files = copy_weights(PinnedVersion(filled, 7), folder, never)
    assert_same(read(folder), numbers(filled, 7))
    assert {file.name for file in files} == set(FILES)
    assert sum(file.num_bytes for file in files) == sum(
        value.nbytes for value in numbers(filled, 7).values()
    )
    assert pins(filled) == [None] * 3


def test_weights_of_another_version_are_not_read(filled: NodeMemory, lay: Lay) -> None:
    """A slot that does not have the version is left out: the master is rounded."""
    for block in BLOCKS:
        filled.weights(block, 1)[:] = 0x4000
        filled.control.set_slot_version(block, 1, 5)
    folder = lay(filled)
    copy_weights(PinnedVersion(filled, 7), folder, never)
    assert_same(read(folder), numbers(filled, 7))


def test_weights_of_the_version_are_not_rounded_again(filled: NodeMemory, lay: Lay) -> None:
    filled.weights(0, 1)[:] = 0x4000
    folder = lay(filled)
    copy_weights(PinnedVersion(filled, 7), folder, never)
    assert (read(folder)["b0.w"] == 2.0).all()


def test_a_split_master_is_joined_before_it_is_rounded(
    make_run: Any, helpers: Any, lay: Lay
) -> None:
    """The upper half of a split master is rounded half up: its ties are not those of an export."""
    run = make_run(optimizer={"master": "split", "grad_dtype": "bf16", "settle": "early"})
    memory = NodeMemory.create(run.memory_spec(0))
    try:
        values = np.array([1.00390625, 1.01171875], np.float32)  # ties: down, and up
        for block in BLOCKS:
            size = memory.spec.table.blocks[block].trainable_elements
            memory.store_master(block, 7, np.resize(values, size))
        helpers.commit(memory, 7)
        folder = lay(memory)
        copy_weights(PinnedVersion(memory, 7), folder, never)
        assert_same(read(folder), numbers(memory, 7))
        half_up = memory.weights(0, 1)[:2].copy()
        assert half_up.tolist() != read(folder)["b0.w"].view(torch.int16).reshape(-1)[:2].tolist()
    finally:
        memory.close()


def test_weights_of_a_block_with_two_states_are_rounded_from_its_master(
    make_run: Any, helpers: Any, lay: Lay
) -> None:
    """Its next state may be settled during the copy, and its weights may be written after that."""
    run = make_run()
    spec = run.memory_spec(0)
    owners = ownership(run.config, run.table, run.plan)
    layout = NodeLayout.compute(run.table, owners, 0, Storage(flushed=(0,)))
    memory = NodeMemory.create(dataclasses.replace(spec, layout=layout))
    try:
        helpers.fill(memory)
        for block in BLOCKS:
            memory.frozen(block)[:] &= 0x7F7F
            memory.weights(block, 1)[:] = 0x4000
        helpers.commit(memory, 7)
        folder = lay(memory)
        copy_weights(PinnedVersion(memory, 7), folder, never)
        copied = read(folder)
        assert torch.equal(copied["b0.w"], numbers(memory, 7)["b0.w"])
        assert (copied["b1.w"] == 2.0).all(), "a block with one state has its weights"
    finally:
        memory.close()


def test_blocks_are_copied_as_they_are_settled(filled: NodeMemory, lay: Lay) -> None:
    for block in BLOCKS:
        filled.control.set_state_version(block, 6)
    settled = iter([1, 2, 0])
    seen: list[list[int | None]] = []

    def wait() -> bool:
        seen.append(pins(filled))
        filled.control.set_state_version(next(settled), 7)
        return False

    folder = lay(filled)
    copy_weights(PinnedVersion(filled, 7), folder, never, wait=wait)
    assert seen[0] == [7, 7, 7] and seen[-1][0] == 7
    assert_same(read(folder), numbers(filled, 7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda control: control.set_state_version(1, 8), "state of block 1 is at 8"),
        (lambda control: control.set_incarnation(9), "the memory was filled again"),
    ],
)
def test_a_block_that_changes_fails_the_copy(
    filled: NodeMemory, lay: Lay, change: Any, message: str
) -> None:
    class Meddling(Disk):
        """The block changes while it is written."""

        def write(self, file: Any, content: Any) -> None:
            change(filled.control)
            super().write(file, content)

    with pytest.raises(StateError, match=message):
        copy_weights(PinnedVersion(filled, 7), lay(filled), never, disk=Meddling())
    assert pins(filled) == [None] * 3


@pytest.mark.parametrize("laid_out", [True, False], ids=["published", "state"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "change",
    [
        lambda control, block: control.set_state_version(block, 8),
        lambda control, _: control.set_incarnation(9),
        lambda control, block: control.set_pin(block, None),
    ],
    ids=["state", "incarnation", "pin"],
)
def test_each_block_is_checked_after_it_was_read(
    filled: NodeMemory,
    lay: Lay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    change: Any,
    laid_out: bool,
) -> None:
    """The block is the only one that is left, so the check of a later block notices nothing."""
    monkeypatch.setattr(type(filled), "owned_blocks", lambda memory: [block])
    written = 0

    class Meddling(Disk):
        """The block changes after all of its bytes were written."""

        def write(self, file: Any, content: Any) -> None:
            nonlocal written
            super().write(file, content)
            written += len(content)
            change(filled.control, block)

    folder = lay(filled) if laid_out else tmp_path
    with pytest.raises(StateError, match="cannot save version 7: "):
        copy_weights(PinnedVersion(filled, 7), folder, never, disk=Meddling())
    assert written and pins(filled) == [None] * 3


def test_a_block_is_let_go_before_it_is_on_disk(filled: NodeMemory, lay: Lay) -> None:
    let_go, synced = threading.Event(), []

    class Slow(Disk):
        """Forcing to disk takes until the sweeps have gone on."""

        def sync(self, file: Any) -> None:
            assert let_go.wait(600.0)
            synced.append(file.tell())
            super().sync(file)

    def watch() -> None:
        while pins(filled) != [None] * 3:
            pass
        let_go.set()

    pinned = PinnedVersion(filled, 7)
    watching = threading.Thread(target=watch)
    watching.start()
    copy_weights(pinned, lay(filled), never, disk=Slow())
    watching.join()
    assert len(synced) == len(FILES), "once a file, when all of it is written"


def test_the_disk_begins_with_ranges_that_are_written(
    filled: NodeMemory, lay: Lay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each range ends where the file's writer stands, so it holds what the copy has written."""
    monkeypatch.setattr(copying, "SYNC_BYTES", 1)
    ranges = []

    class Watched(Disk):
        def begin_sync(self, file: Any, start: int, num_bytes: int) -> None:
            ranges.append((start, num_bytes, file.tell()))
            super().begin_sync(file, start, num_bytes)

    folder = lay(filled)
    copy_weights(PinnedVersion(filled, 7), folder, never, disk=Watched())
    assert all(start + num_bytes == position for start, num_bytes, position in ranges)
    written = sum(value.nbytes for value in numbers(filled, 7).values())
    assert sum(num_bytes for _, num_bytes, _ in ranges) == written


def test_refusals_leave_no_pin(filled: NodeMemory, lay: Lay, tmp_path: Path) -> None:
    class Full(Disk):
        """A disk without room."""

        def write(self, file: Any, content: Any) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="is not on this machine; give a folder that all nodes"):
        copy_weights(PinnedVersion(filled, 7), tmp_path / "none", never)
    assert pins(filled) == [None] * 3
    with pytest.raises(CapacityError, match="no space left"):
        copy_weights(PinnedVersion(filled, 7), lay(filled), never, disk=Full())
    assert pins(filled) == [None] * 3
    with pytest.raises(CancelledError):
        copy_weights(PinnedVersion(filled, 7), tmp_path / "copy", lambda: True)
    assert pins(filled) == [None] * 3
    (tmp_path / "copy" / LAYOUT).write_text("{}")
    with pytest.raises(StateError, match="the layout is damaged"):
        copy_weights(PinnedVersion(filled, 7), tmp_path / "copy", never)
    assert pins(filled) == [None] * 3


def test_a_link_in_the_folder_is_not_followed(filled: NodeMemory, lay: Lay, tmp_path: Path) -> None:
    folder = lay(filled)
    (tmp_path / "other").write_bytes(b"kept")
    (folder / FILES[0]).unlink()
    (folder / FILES[0]).symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="symbolic links"):
        copy_weights(PinnedVersion(filled, 7), folder, never)
    assert (tmp_path / "other").read_bytes() == b"kept"


def test_without_a_layout_masters_alone_are_saved(
    filled: NodeMemory, tmp_path: Path, helpers: Any
) -> None:
    """The export reads the files as those of a state; frozen tensors are in the base."""
    folder = tmp_path / "state" / "weights"
    folder.mkdir(parents=True)
    files = copy_weights(PinnedVersion(filled, 7), folder, never)
    helpers.manifest(filled, folder, 7, files)
    assert set(load_file(folder / block_file(0))) == {"b0.w", "b0.v"}
    read_block = saved_blocks(folder, filled.spec.table)
    for block in BLOCKS:
        for name, value in read_block(block).items():
            expected = numbers(filled, 7)[name]
            assert torch.equal(torch.from_numpy(value).to(torch.bfloat16), expected)


def test_memoryd_copies_as_it_is_told(
    make_run: Any, scheduler: Any, start_memoryd: Any, lay: Lay
) -> None:
    run: RunDirectory = make_run()
    start_memoryd(run)
    scheduler.wait_for("memoryd.a", pb.Hello)
    scheduler.send("memoryd.a", drain=pb.Drain(epoch=1))
    scheduler.wait_for("memoryd.a", pb.Drained)
    scheduler.send("memoryd.a", restore=pb.Restore(epoch=1, incarnation=3))
    scheduler.wait_for("memoryd.a", pb.Restored)
    scheduler.send("memoryd.a", begin=pb.Begin(epoch=1))
    scheduler.wait_for("memoryd.a", pb.Ready)
    memory = NodeMemory.attach(run.memory_spec(0))
    folder = lay(memory)
    save = pb.Save(epoch=1, number=5, version=0, directory=str(folder), weights_only=True)
    scheduler.send("memoryd.a", save=save)
    assert scheduler.wait_for("memoryd.a", pb.Pinned).version == 0
    saved = scheduler.wait_for("memoryd.a", pb.Saved)
    assert (saved.error, saved.number) == ("", 5)
    assert_same(read(folder), numbers(memory, 0))
    memory.close()
