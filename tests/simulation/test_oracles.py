"""The oracles by themselves: sums in the documented order, messages against the journal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.daemons.kit.messages import record_message
from penstock.daemons.scheduler.machine.position import Position
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord, Decision
from tests.simulation.announced import Announcements
from tests.simulation.configurations import SHAPES, Shape
from tests.simulation.results import GOLDEN
from tests.simulation.vouched import sum_of_squares

SQUARES = (1.0, 2e-16, 1e-16, 1e-16)
"""Their sum from the first to the last is not that from the last to the first."""


def test_squares_are_summed_as_sweeps_sum_them() -> None:
    dice = np.random.default_rng(3)
    with _native.Pool([0]) as pool:
        for count in (16, 64, 80, 4096):
            arrays = [_mapped(dice.standard_normal(count).astype(np.float32)) for _ in range(3)]
            status = _native.gradient_status(pool, grads=arrays)
            assert sum_of_squares(arrays) == status.sum_squares


def _mapped(values: Any) -> Any:
    """Returns the values on a page of their own, as native sweeps want them."""
    room = np.empty(values.nbytes + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    array = room[start : start + values.nbytes].view(np.float32)
    array[:] = values
    return array


@pytest.fixture
def announced(tmp_path: Path) -> Announcements:
    """A run of four blocks that clips, at version 0 of filling 9."""
    shape = Shape(name="test", clip=0.5)
    found = Announcements(shape.config(tmp_path), shape.table(), lambda attempt, block: None)
    found.epoch_began(1)
    position = Position(version=0, data_position=0, loss_scale=1.0)
    assert not [*found.decided(CommitRecord.of_restore(0, 9), position, "")]
    for block, squares in enumerate(SQUARES):
        status = pb.BlockStatus(attempt=1, block=block, finite=True, sum_squares=squares)
        assert not [*found.heard(pb.MemberMessage(block_status=status), "optimizerd.a")]
    return found


def _amended(norm: float) -> CommitRecord:
    return CommitRecord(
        version=1,
        attempt=1,
        decision=Decision.AMEND,
        coefficient=0.5 / (norm + 1e-6),
        inverse_loss_scale=1.0,
        learning_rate=0.1,
        bias_step=1,
        incarnation=9,
    )


def _norm(squares: tuple[float, ...]) -> float:
    total = 0.0
    for value in squares:
        total += value
    return math.sqrt(total)


def test_a_step_is_announced_behind_its_row_only(announced: Announcements) -> None:
    record = _amended(_norm(SQUARES))
    commit = pb.SchedulerMessage(commit=pb.Commit(epoch=1, record=record_message(record)))
    (objection,) = announced.sends("worker.0", commit)
    assert objection.startswith("commit to worker.0: ")
    line = json.dumps({"grad_norm": _norm(SQUARES), "loss": None})
    position = Position(version=1, data_position=4, loss_scale=1.0)
    assert not [*announced.decided(record, position, line)]
    assert not [*announced.sends("worker.0", commit)]


def test_a_sum_in_another_order_is_seen_in_its_last_bit(announced: Announcements) -> None:
    other = _norm(SQUARES[::-1])
    assert other != _norm(SQUARES) and abs(other - _norm(SQUARES)) < 1e-15
    position = Position(version=1, data_position=4, loss_scale=1.0)
    line = json.dumps({"grad_norm": other, "loss": None})
    coefficient, norm = announced.decided(_amended(other), position, line)
    assert "coefficient" in coefficient and "norm" in norm


def test_a_refill_is_ordered_behind_its_row_only(announced: Announcements) -> None:
    record = record_message(CommitRecord.of_restore(0, 9))
    restore = pb.Restore(epoch=1, incarnation=9, partner="b:1", record=record, generation=1)
    message = pb.SchedulerMessage(restore=restore)
    (objection,) = announced.sends("memoryd.a", message)
    assert objection == "restore to memoryd.a: generation 1, journaled is 0"
    announced.replaced({"memoryd.a": 1})
    assert not [*announced.sends("memoryd.a", message)]
    assert not [*announced.filled("memoryd.a", 9, 1, 0)]
    assert [*announced.filled("memoryd.a", 9, 0, 0)]


def test_all_shapes_have_a_golden_digest() -> None:
    assert json.loads(GOLDEN.read_text()).keys() == {shape.name for shape in SHAPES}
