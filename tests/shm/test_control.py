"""The control segment: one test per field of the drawn layout, and every bad header."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable

import pytest

from penstock.host.process_identity import ProcessIdentity
from penstock.shm.control import (
    INVALID_VERSION,
    CommitRecord,
    ControlView,
    Decision,
    SweepIntent,
    control_bytes,
)
from penstock.shm.layout import PAGE_BYTES
from penstock.shm.segment import (
    BadHeaderError,
    ForeignOwnerError,
    SegmentError,
    ShortSegmentError,
    VersionMismatchError,
)

RUN_ID = "0123456789ab"
DIGEST = bytes(range(32))
NUM_BLOCKS = 3
UNDO_BYTES = 5000
BLOCK_WORDS = 4096 + 8192  # after the header page and the undo area, rounded up to pages


def record(version: int = 7, **changes: object) -> CommitRecord:
    fields: dict[str, object] = {
        "version": version,
        "attempt": 9,
        "decision": Decision.AMEND,
        "coefficient": 0.25,
        "inverse_loss_scale": 2.0**-16,
        "learning_rate": 3.0e-4,
        "bias_step": 7,
        "incarnation": 2,
    }
    return CommitRecord(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def buffer() -> memoryview:
    return memoryview(bytearray(control_bytes(NUM_BLOCKS, UNDO_BYTES)))


@pytest.fixture
def view(buffer: memoryview) -> ControlView:
    return ControlView.initialize(
        buffer, run_id=RUN_ID, digest=DIGEST, num_blocks=NUM_BLOCKS, undo_bytes=UNDO_BYTES
    )


def word(buffer: memoryview, offset: int) -> int:
    return int(struct.unpack_from("<Q", buffer, offset)[0])


def test_header_words(buffer: memoryview, view: ControlView) -> None:
    assert bytes(buffer[:8]) == b"PNSTOCK1"
    assert word(buffer, 8) == 4
    assert bytes(buffer[16:32]) == b"0123456789ab\0\0\0\0"
    assert bytes(buffer[32:64]) == DIGEST
    assert word(buffer, 64) == NUM_BLOCKS
    assert word(buffer, 72) == UNDO_BYTES
    assert view.run_id == RUN_ID


def test_owner_words(buffer: memoryview, view: ControlView) -> None:
    assert view.owner == ProcessIdentity.current()
    other = ProcessIdentity(pid=5, start_ticks=6, boot=uuid.UUID(int=7))
    view.set_owner(other)
    assert (word(buffer, 88), word(buffer, 96)) == (5, 6)
    assert bytes(buffer[104:120]) == uuid.UUID(int=7).bytes
    assert view.owner == other


@pytest.mark.parametrize(
    ("offset", "write", "read"),
    [
        (80, lambda v, n: v.set_incarnation(n), lambda v: v.incarnation),
        (120, lambda v, n: v.set_epoch(n), lambda v: v.epoch),
        (128, lambda v, n: v.set_committed(n), lambda v: v.committed),
        (
            BLOCK_WORDS + 384,
            lambda v, n: v.set_state_version(1, n),
            lambda v: v.state_version(1),
        ),
    ],
)
def test_single_words(
    buffer: memoryview,
    view: ControlView,
    offset: int,
    write: Callable[[ControlView, int], None],
    read: Callable[[ControlView], int],
) -> None:
    before = bytes(buffer)
    write(view, 12345)
    assert word(buffer, offset) == read(view) == 12345
    assert bytes(buffer[:offset]) == before[:offset]
    assert bytes(buffer[offset + 8 :]) == before[offset + 8 :]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_has_a_version_and_a_sequence(
    buffer: memoryview, view: ControlView, slot: int
) -> None:
    version, sequence = BLOCK_WORDS + 768 + 8 + 8 * slot, BLOCK_WORDS + 768 + 128 + 8 * slot
    before = bytes(buffer)
    view.set_slot_version(2, slot, 12345)
    assert word(buffer, version) == view.slot_version(2, slot) == 12345
    assert word(buffer, sequence) == view.slot_sequence(2, slot) == 2
    for place in (version, sequence):
        buffer[place : place + 8] = before[place : place + 8]
    assert bytes(buffer) == before


def test_sequences_are_odd_while_somebody_may_write_and_never_repeat(view: ControlView) -> None:
    seen = [view.slot_sequence(0, 0)]
    for version in (INVALID_VERSION, INVALID_VERSION, 2, INVALID_VERSION, 2, 4):
        view.set_slot_version(0, 0, version)
        seen.append(view.slot_sequence(0, 0))
    assert seen == [1, 3, 5, 6, 7, 8, 10]  # version 2 twice, as after a skip


def test_sequences_of_gradients_and_frozen_weights(buffer: memoryview, view: ControlView) -> None:
    for copy, contribution, offset in ((0, 0, 160), (0, 11, 248), (1, 0, 256), (1, 11, 344)):
        view.begin_gradients(1, copy, contribution)
        assert word(buffer, BLOCK_WORDS + 384 + offset) == 1
        view.end_gradients(1, copy, contribution)
        assert view.gradient_sequence(1, copy, contribution) == 2
    view.begin_frozen(1)
    assert word(buffer, BLOCK_WORDS + 384 + 144) == 1
    view.end_frozen(1)
    assert view.frozen_sequence(1) == 2
    assert view.ready(1, 11) == (0, 0)
    assert word(buffer, BLOCK_WORDS + 768 + 128) == 1  # the next block's first sequence


def test_a_kill_between_sequence_and_version_is_mended(
    buffer: memoryview, view: ControlView
) -> None:
    view.set_slot_version(0, 0, 2)
    sequence = BLOCK_WORDS + 128
    buffer[sequence : sequence + 8] = struct.pack("<Q", 3)  # killed before the version's store
    view.mend_sequences(range(NUM_BLOCKS))
    assert view.slot_sequence(0, 0) == 4
    assert view.slot_sequence(0, 1) == 1  # it holds no version: it stays odd


def test_ready_words(buffer: memoryview, view: ControlView) -> None:
    view.set_ready(1, 11, epoch=3, attempt=4)
    assert word(buffer, BLOCK_WORDS + 384 + 32 + 8 * 11) == (3 << 32) | 4
    assert view.ready(1, 11) == (3, 4)
    assert view.ready(1, 10) == view.ready(2, 0) == (0, 0)


def test_records_keep_the_last_two(buffer: memoryview, view: ControlView) -> None:
    for version in (5, 6, 7):
        view.write_record(record(version))
    assert word(buffer, 256) == 6
    assert word(buffer, 384) == 7
    assert view.record(5) is None
    assert view.record(6) == record(6)
    assert view.record(7) == record(7)


@pytest.mark.parametrize("cut", [0, 1, 8, 30, 63, 64, 65, 67])
def test_a_record_cut_short_counts_as_absent(
    buffer: memoryview, view: ControlView, cut: int
) -> None:
    view.write_record(record(5))
    data = record(7, attempt=2**40, coefficient=1 / 3).pack()
    buffer[384 : 384 + cut] = data[:cut]
    assert view.record(7) is None


@pytest.mark.parametrize("bit", range(0, 72 * 8, 37))
def test_a_flipped_bit_of_a_record_is_noticed(
    buffer: memoryview, view: ControlView, bit: int
) -> None:
    view.write_record(record(6))
    buffer[256 + bit // 8] ^= 1 << (bit % 8)
    assert view.record(6) is None


def test_a_record_with_an_unknown_decision_counts_as_absent() -> None:
    assert CommitRecord.unpack(record(decision=5).pack()) is None
    assert CommitRecord.unpack(bytes(72)) is None


def test_sweep_intent(buffer: memoryview, view: ControlView) -> None:
    assert view.interrupted_sweep is None
    view.begin_sweep(SweepIntent(block=2, state_version=8))
    assert [word(buffer, offset) for offset in (512, 520, 528)] == [1, 2, 8]
    assert view.interrupted_sweep == SweepIntent(block=2, state_version=8)
    view.end_sweep()
    assert view.interrupted_sweep is None


def test_undo_area_lies_between_header_and_blocks(buffer: memoryview, view: ControlView) -> None:
    view.undo_area[0] = 1
    view.undo_area[UNDO_BYTES - 1] = 2
    assert len(view.undo_area) == UNDO_BYTES
    assert (buffer[PAGE_BYTES], buffer[PAGE_BYTES + UNDO_BYTES - 1]) == (1, 2)


def test_fresh_slots_hold_no_version(view: ControlView) -> None:
    slots = [view.slot_version(b, s) for b in range(NUM_BLOCKS) for s in (0, 1)]
    assert slots == [INVALID_VERSION] * 6
    assert not any(view.readable(b, v) for b in range(NUM_BLOCKS) for v in (0, 1, INVALID_VERSION))


def test_readable_needs_version_and_commit(view: ControlView) -> None:
    view.set_slot_version(0, 1, 3)
    view.set_committed(2)
    assert not view.readable(0, 3)
    view.set_committed(3)
    assert view.readable(0, 3)
    assert not view.readable(0, 1)


def test_clear_history_forgets_records_sweeps_and_gradients(view: ControlView) -> None:
    view.write_record(record(7))
    view.begin_sweep(SweepIntent(block=1, state_version=3))
    view.undo_area[:] = b"\1" * UNDO_BYTES
    view.set_ready(2, 11, epoch=1, attempt=1)
    view.set_state_version(1, 5)
    view.clear_history()
    assert view.record(7) is None
    assert view.interrupted_sweep is None
    assert bytes(view.undo_area) == bytes(UNDO_BYTES)
    assert view.ready(2, 11) == (0, 0)
    assert view.state_version(1) == 5


def test_validate_allows_a_lag_of_one(view: ControlView) -> None:
    view.set_committed(4)
    view.set_state_version(0, 4)
    view.set_state_version(1, 3)
    view.validate((0, 1))
    for wrong in (2, 5):
        view.set_state_version(1, wrong)
        with pytest.raises(ValueError, match=f"block 1: state version {wrong}, committed 4"):
            view.validate((0, 1))


def put(offset: int, data: bytes) -> Callable[[memoryview], memoryview]:
    def change(buffer: memoryview) -> memoryview:
        buffer[offset : offset + len(data)] = data
        return buffer

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (put(0, bytes(8)), BadHeaderError, "no Penstock header"),
        (put(0, b"PNSTOCK2"), BadHeaderError, "no Penstock header"),
        (
            put(8, struct.pack("<Q", 1)),
            VersionMismatchError,
            "format 1, this Penstock reads 3 and 4",
        ),
        (put(16, b"ffff"), ForeignOwnerError, "belongs to run 'ffff456789ab'"),
        (put(16, b"\xff"), ForeignOwnerError, "belongs to run"),
        (put(32, b"\xff"), ForeignOwnerError, "made for another model"),
        (put(64, struct.pack("<Q", 10**6)), ShortSegmentError, "its layout needs"),
        (put(64, b"\xff" * 16), ShortSegmentError, "its layout needs"),
        (lambda b: b[: PAGE_BYTES - 1], ShortSegmentError, "a header needs 4096"),
        (lambda b: b[:0], ShortSegmentError, "has 0 bytes"),
        (lambda b: b[:-4096], ShortSegmentError, "its layout needs"),
    ],
)
def test_bad_headers_are_named_and_untouched(
    buffer: memoryview,
    view: ControlView,
    change: Callable[[memoryview], memoryview],
    error: type[SegmentError],
    message: str,
) -> None:
    changed = change(buffer)
    before = bytes(buffer)
    with pytest.raises(error, match=message):
        ControlView.open(changed, run_id=RUN_ID, digest=DIGEST)
    assert bytes(buffer) == before


def test_open_reads_what_initialize_wrote(buffer: memoryview, view: ControlView) -> None:
    view.set_committed(3)
    found = ControlView.open(buffer, run_id=RUN_ID, digest=DIGEST)
    assert (found.num_blocks, found.undo_bytes, found.committed) == (NUM_BLOCKS, UNDO_BYTES, 3)
    assert ControlView.open(buffer, run_id=RUN_ID, digest=None).committed == 3
