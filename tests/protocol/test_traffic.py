"""Copies through an emulated node's memory, and what they leave for the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from penstock.protocol.run.hardware.bandwidth_log import ENTRIES, BandwidthLog, Copy, finish_at


@pytest.fixture
def board(tmp_path: Path) -> Iterator[BandwidthLog]:
    made = BandwidthLog.of_node(tmp_path, "a", 2)
    yield made
    made.close()


def test_what_devices_announce_is_seen_through_another_mapping(
    board: BandwidthLog, tmp_path: Path
) -> None:
    reader = BandwidthLog.of_node(tmp_path, "a", 2)
    board.post(0, Copy(1.0, 2.0, 10.0))
    board.post(1, Copy(1.5, 3.0, 20.0))
    assert reader.since(0.0) == [Copy(1.0, 2.0, 10.0), Copy(1.5, 3.0, 20.0)]
    assert reader.since(2.0) == [Copy(1.5, 3.0, 20.0)]
    reader.clear()
    assert board.since(0.0) == []
    reader.close()


def test_only_the_last_copies_are_remembered(board: BandwidthLog) -> None:
    for number in range(ENTRIES + 1):
        board.post(1, Copy(number, number + 1.0, 1.0))
    assert len(board.since(-1.0)) == ENTRIES
    assert Copy(0.0, 1.0, 1.0) not in board.since(-1.0)


@pytest.mark.parametrize(
    ("copies", "limit", "end"),
    [
        ((), inf, 11.0),  # 100 bytes at 100 bytes/s
        ((), 50.0, 12.0),
        ((Copy(10.0, 20.0, 50.0),), inf, 12.0),
        ((Copy(10.0, 10.5, 60.0),), inf, 11.3),  # 20 bytes, then 80 at full speed
        ((Copy(10.5, 20.0, 75.0),), inf, 12.5),
        ((Copy(10.0, 20.0, 40.0), Copy(10.0, 20.0, 20.0)), 30.0, 10.0 + 100 / 30),
        ((Copy(0.0, 99.0, 500.0),), inf, 30.0),  # never less than a twentieth
        ((Copy(0.0, 10.0, 99.0),), inf, 11.0),  # over before it begins
    ],
)
def test_a_sweep_has_what_copies_leave(copies: tuple[Copy, ...], limit: float, end: float) -> None:
    found = finish_at(10.0, 100.0, limit=limit, capacity=100.0, copies=copies)
    assert found == pytest.approx(end)


def test_without_a_limit_of_memory_copies_do_not_matter() -> None:
    copies = (Copy(0.0, 99.0, 500.0),)
    assert finish_at(1.0, 6.0, limit=3.0, capacity=inf, copies=copies) == 3.0
