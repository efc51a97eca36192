"""The undo area: layout, when it refuses, and repair after every possible prefix of the stores."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import _native

HEADER_BYTES, PIECE_BYTES = 64, 576
IDLE, ARMED, REPAIRED = 0, 1, 3
WORDS = ("state", "tag", "completed", "format", "num_elements", "num_pieces_0", "num_pieces_1")


def header(undo: Any) -> dict[str, int]:
    """The header words by name."""
    return dict(zip(WORDS, struct.unpack_from("<7Q", undo), strict=True))


def set_header(undo: Any, **words: int) -> None:
    """Overwrite header words."""
    struct.pack_into("<7Q", undo, 0, *(header(undo) | words).values())


def piece_offset(undo: Any, piece: int, table: int = 0) -> int:
    """Where a piece begins."""
    capacity = (len(undo) - HEADER_BYTES) // (2 * PIECE_BYTES)
    return HEADER_BYTES + (table * capacity + piece) * PIECE_BYTES


def slot_offset(undo: Any, piece: int, parity: int, table: int = 0) -> int:
    """Where a slot begins."""
    return piece_offset(undo, piece, table) + 64 + 256 * parity


def settle(pool: _native.Pool, block: Any, grads: Any, kit: Any, **options: Any) -> None:
    """Settle a block with usual hyper-parameters."""
    hyper = kit.hyper()
    _native.settle(pool, grads=grads, hyper=hyper, undo=block.undo, **block.state, **options)


def test_size_grows_by_two_tables_of_pieces() -> None:
    assert [_native.undo_bytes(n) for n in (1, 2, 64)] == [1216, 2368, 73792]
    with pytest.raises(ValueError, match="num_threads is 0"):
        _native.undo_bytes(0)


def test_what_a_finished_sweep_leaves(pool: _native.Pool, kit: Any) -> None:
    """Each field at its place: header, pieces of both threads, the last two vectors of each."""
    num_elements = 4 * 4096
    block = kit.block(num_elements, 1)
    before = block.copy()
    settle(pool, block, kit.gradients(num_elements, 2, bf16=True), kit, tag=99)
    assert header(block.undo) | {"format": 0} == {
        "state": IDLE,
        "tag": 99,
        "completed": 99,
        "format": 0,
        "num_elements": num_elements,
        "num_pieces_0": 2,
        "num_pieces_1": 0,
    }
    assert struct.pack("<Q", header(block.undo)["format"]) == b"PSUNDO01"
    for piece, (start, end) in enumerate([(0, 8192), (8192, 16384)]):
        offset = piece_offset(block.undo, piece)
        assert struct.unpack_from("<2Q", block.undo, offset) == (start, end)
        for parity in (0, 1):
            first = end - 32 + 16 * parity
            slot = slot_offset(block.undo, piece, parity)
            old = [array[first : first + 16].tobytes() for array in before.each]
            assert block.undo[slot : slot + 192].tobytes() == b"".join(old)
            assert struct.unpack_from("<Q", block.undo, slot + 192) == (first + 1,)


def test_an_idle_area_has_nothing_to_repair(pool: _native.Pool, kit: Any) -> None:
    block = kit.block(64, 1)
    before = block.bits()
    assert _native.repair(block.undo, **block.arrays) == []
    state = _native.undo_state(block.undo)
    assert (state.armed, state.tag, state.completed) == (False, 0, 0)
    assert block.bits() == before


def arm(block: Any, pieces: list[tuple[int, int]], *, tag: int = 5) -> None:
    """What a sweep writes before it touches any array."""
    for index, (start, end) in enumerate(pieces):
        struct.pack_into("<2Q", block.undo, piece_offset(block.undo, index), start, end)
    set_header(
        block.undo,
        state=ARMED,
        tag=tag,
        format=int.from_bytes(b"PSUNDO01", "little"),
        num_elements=block.master.size,
        num_pieces_0=len(pieces),
    )


def test_an_armed_area_must_be_repaired_first(pool: _native.Pool, kit: Any) -> None:
    block = kit.block(64, 1)
    grads = kit.gradients(64, 2, bf16=False)
    arm(block, [(0, 32), (32, 64)])
    before = block.bits()
    assert _native.undo_state(block.undo).armed
    for spans in (None, [(0, 32), (32, 64)]):
        with pytest.raises(RuntimeError, match=r"undo is armed \(tag 5\).*repair"):
            settle(pool, block, grads, kit, spans=spans, tag=5)
    assert _native.repair(block.undo, **block.arrays) == [(0, 32), (32, 64)]
    assert _native.undo_state(block.undo).armed  # until the sweep is complete
    for options in ({}, {"tag": 5}, {"spans": [(0, 32), (32, 64)]}, {"spans": [(0, 32)], "tag": 5}):
        with pytest.raises(RuntimeError, match=r"repaired sweep \(tag 5\)"):
            settle(pool, block, grads, kit, **options)
    assert block.bits() == before
    assert _native.repair(block.undo, **block.arrays) == [(0, 32), (32, 64)]
    settle(pool, block, grads, kit, spans=[(0, 32), (32, 64)], tag=5)
    state = _native.undo_state(block.undo)
    assert (state.armed, state.completed) == (False, 5)
    assert header(block.undo)["num_pieces_1"] == 2  # the other table took over


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"state": 77}, "not an undo area"),
        ({"format": 1}, "not an undo area"),
        ({"num_pieces_0": 500}, "not an undo area"),
        ({"num_elements": 32}, "undo belongs to arrays of 32 elements, not 64"),
    ],
)
def test_a_foreign_or_damaged_area_is_refused(
    words: dict[str, int], message: str, kit: Any
) -> None:
    block = kit.block(64, 1)
    arm(block, [(0, 64)])
    set_header(block.undo, **words)
    before = block.bits()
    with pytest.raises(ValueError, match=message):
        _native.repair(block.undo, **block.arrays)
    assert block.bits() == before


@pytest.mark.parametrize("position", [16, 64 + 16, 41])
def test_a_slot_outside_its_piece_is_refused(position: int, kit: Any) -> None:
    block = kit.block(96, 1)
    arm(block, [(0, 96), (32, 64)])
    before = block.bits()
    struct.pack_into("<Q", block.undo, slot_offset(block.undo, 0, 0) + 192, 1)
    struct.pack_into("<Q", block.undo, slot_offset(block.undo, 1, 0) + 192, position + 1)
    with pytest.raises(ValueError, match=f"damaged: saved element {position} lies outside"):
        _native.repair(block.undo, **block.arrays)
    assert block.bits() == before  # the other piece was not touched either


Store = tuple[Any, int, bytes]


def stores_of_a_sweep(old: Any, new: Any, block: Any, rng: random.Random) -> Iterator[Store]:
    """The stores of one thread, four bytes each, as undo.h orders them: (array, offset, bytes).

    Within a group the order is free, so it is shuffled.
    """
    for first in range(0, old.master.size, 16):
        slot = slot_offset(block.undo, 0, first // 16 % 2)
        save: list[Store] = []
        write: list[Store] = []
        for index, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
            for lane in range(16):
                place = slice(first + lane, first + lane + 1)
                old_bytes = getattr(old, name)[place].tobytes()
                new_bytes = getattr(new, name)[place].tobytes()
                save.append((block.undo, slot + 64 * index + 4 * lane, old_bytes))
                target = getattr(block, name).view(np.uint8)
                write.append((target, 4 * (first + lane), new_bytes))
        rng.shuffle(save)
        rng.shuffle(write)
        yield from save
        yield (block.undo, slot + 192, struct.pack("<Q", first + 1))
        yield from write


def test_every_prefix_of_the_stores_can_be_repaired(pool: _native.Pool, kit: Any) -> None:
    """A kill leaves a prefix: try each, with a repair that is itself done twice."""
    num_elements = 80
    old = kit.block(num_elements, 1)
    grads = kit.gradients(num_elements, 2, bf16=True)
    new = old.copy()
    settle(pool, new, grads, kit)
    killed = old.copy()
    arm(killed, [(0, num_elements)])
    stores = list(stores_of_a_sweep(old, new, killed, random.Random(3)))
    assert len(stores) == 5 * 97
    for array, offset, content in [*stores, (killed.undo, 0, bytes([ARMED]))]:
        found = killed.copy()
        spans = _native.repair(found.undo, **found.arrays)
        assert _native.repair(found.undo, **found.arrays) == spans
        settle(pool, found, grads, kit, spans=spans, tag=5)
        assert found.bits() == new.bits()
        array[offset : offset + len(content)] = np.frombuffer(content, np.uint8)


def test_a_sweep_cut_short_while_it_completes_another(pool: _native.Pool, kit: Any) -> None:
    """The second sweep uses the other table; until it is armed the first still counts."""
    num_elements = 96
    old = kit.block(num_elements, 1)
    grads = kit.gradients(num_elements, 2, bf16=False)
    new = old.copy()
    settle(pool, new, grads, kit)
    block = old.copy()
    arm(block, [(0, 48), (48, 96)])
    spans = _native.repair(block.undo, **block.arrays)
    struct.pack_into("<2Q", block.undo, piece_offset(block.undo, 0, table=1), 16, 32)
    set_header(block.undo, num_pieces_1=1)  # killed while arming again
    assert _native.repair(block.undo, **block.arrays) == spans
    settle(pool, block, grads, kit, spans=spans, tag=5)
    set_header(block.undo, state=ARMED + 1)  # killed before the last store of the second sweep
    spans = _native.repair(block.undo, **block.arrays)
    assert spans == [(32, 48), (80, 96)]  # one vector a piece is done again
    settle(pool, block, grads, kit, spans=spans, tag=5)
    assert block.bits() == new.bits()
