"""Saving while training goes on: pins, what is read when, and that nothing wrong is written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.daemons.memory import saving, snapshot
from penstock.daemons.memory.pinning import PinnedVersion, let_go_of_all
from penstock.host.errors import StateError
from penstock.shm.control import SweepIntent
from penstock.shm.memory import NodeMemory

BLOCKS = range(3)


@pytest.fixture
def behind(memory: NodeMemory, helpers: Any) -> NodeMemory:
    """Version 7 is committed, no block's state contains it yet."""
    helpers.fill(memory)
    helpers.commit(memory, 7)
    for block in BLOCKS:
        memory.control.set_state_version(block, 6)
    return memory


def pins(memory: NodeMemory) -> list[int | None]:
    return [memory.control.pin(block) for block in BLOCKS]


def test_blocks_are_read_as_they_are_settled_and_let_go(behind: NodeMemory, tmp_path: Path) -> None:
    pinned, control = PinnedVersion(behind, 7), behind.control
    assert pins(behind) == [7, 7, 7]
    settled = iter([1, 2, 0])
    seen: list[list[int | None]] = []

    def wait() -> bool:
        """The optimizer settles one block each time that nothing is left to read."""
        seen.append(pins(behind))
        control.set_state_version(next(settled), 7)
        return False

    files = saving.save(pinned, tmp_path / "s", lambda: False, wait=wait)
    assert [file.name for file in files if not file.base] == [
        snapshot.block_file(block) for block in BLOCKS
    ]
    assert seen[0] == [7, 7, 7]
    assert seen[-1][0] == 7, "what is not settled is not read"
    assert pins(behind) == [None] * 3


def test_the_last_block_is_read_first(memory: NodeMemory, tmp_path: Path, helpers: Any) -> None:
    helpers.commit(memory, 7)
    due = saving.SettledBlocks(PinnedVersion(memory, 7), BLOCKS, lambda: False)
    assert [due.take(lambda: False) for _ in BLOCKS] == [2, 1, 0]


def test_the_commit_may_come_after_the_order_to_save(behind: NodeMemory, tmp_path: Path) -> None:
    behind.control.set_committed(6)
    pinned = PinnedVersion(behind, 7)
    assert not pinned.is_there(0)
    behind.control.set_state_version(0, 7)
    assert not pinned.is_there(0), "ahead of the commit: it may be taken back"
    behind.control.set_committed(7)
    assert pinned.is_there(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda control: control.set_state_version(1, 8), "state of block 1 is at 8"),
        (lambda control: control.set_incarnation(9), "the memory was filled again"),
        (lambda control: control.set_pin(1, None), "the pin of block 1 is None"),
        (
            lambda control: control.begin_sweep(SweepIntent(block=1, state_version=8)),
            "a sweep leads block 1 to 8 in spite of its pin",
        ),
    ],
)
def test_what_was_read_is_checked_afterwards(
    memory: NodeMemory, tmp_path: Path, helpers: Any, change: Any, message: str
) -> None:
    helpers.commit(memory, 7)

    class Meddling(saving.Disk):
        """The block changes while its file is written."""

        def create(self, path: Path) -> Any:
            if path.name == snapshot.block_file(1):
                change(memory.control)
            return super().create(path)

    with pytest.raises(StateError, match=message):
        saving.save(PinnedVersion(memory, 7), tmp_path / "s", lambda: False, disk=Meddling())
    assert list((tmp_path / "s").iterdir()) == []
    assert pins(memory) == [None] * 3


def test_a_block_is_let_go_before_it_is_on_disk(
    memory: NodeMemory, tmp_path: Path, helpers: Any
) -> None:
    helpers.commit(memory, 7)
    let_go, synced = threading.Event(), []

    class Slow(saving.Disk):
        """Forcing to disk takes until the sweeps have gone on."""

        def sync(self, file: Any) -> None:
            assert let_go.wait(600.0)
            synced.append(file.name)

    def watch() -> None:
        deadline_s = time.monotonic() + 600.0
        while pins(memory) != [None] * 3 and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert not synced
        let_go.set()

    watching = threading.Thread(target=watch)
    pinned = PinnedVersion(memory, 7)
    watching.start()
    saving.save(pinned, tmp_path / "s", lambda: False, disk=Slow())
    watching.join()
    assert len(synced) == 6


def test_pins_of_a_dead_memoryd_hold_nothing_back(memory: NodeMemory, helpers: Any) -> None:
    helpers.commit(memory, 7)
    PinnedVersion(memory, 7)
    let_go_of_all(memory)
    assert pins(memory) == [None] * 3
