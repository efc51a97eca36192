"""Atomic words in byte buffers."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest

from penstock._native import compare_exchange_u64, fetch_add_u64, load_u64, store_u64


def test_words_are_little_endian_and_unsigned() -> None:
    buffer = mmap.mmap(-1, 4096)
    store_u64(buffer, 8, 0x1122_3344_5566_7788)
    store_u64(buffer, 16, 2**64 - 1)
    assert buffer[8:16] == bytes.fromhex("8877665544332211")
    assert load_u64(buffer, 8) == 0x1122_3344_5566_7788
    assert load_u64(buffer, 16) == 2**64 - 1
    assert buffer[:8] == bytes(8)


def test_any_contiguous_buffer_will_do() -> None:
    words = np.array([5, 6], np.uint64)
    store_u64(words, 8, 7)
    assert words.tolist() == [5, 7]
    assert load_u64(words.data.toreadonly(), 0) == 5


def test_fetch_add_wraps_and_returns_the_value_before() -> None:
    words = np.array([2**64 - 1], np.uint64)
    assert fetch_add_u64(words, 0, 3) == 2**64 - 1
    assert words[0] == 2


def test_compare_exchange_only_replaces_what_was_expected() -> None:
    words = np.array([4], np.uint64)
    assert not compare_exchange_u64(words, 0, 5, 9)
    assert words[0] == 4
    assert compare_exchange_u64(words, 0, 4, 9)
    assert words[0] == 9


def test_concurrent_additions_are_all_counted() -> None:
    words = np.zeros(1, np.uint64)

    def add() -> None:
        for _ in range(5000):
            fetch_add_u64(words, 0, 1)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert words[0] == 15000


@pytest.mark.parametrize("byte_offset", [-8, 57, 64, 2**62])
def test_words_outside_the_buffer_are_refused(byte_offset: int) -> None:
    with pytest.raises(ValueError, match=rf"byte_offset {byte_offset} .*64 bytes"):
        load_u64(bytearray(64), byte_offset)


def test_misaligned_words_are_refused() -> None:
    words = np.zeros(8, np.uint64)
    for access in (
        lambda: load_u64(words, 4),
        lambda: store_u64(words, 4, 1),
        lambda: fetch_add_u64(words, 4, 1),
        lambda: compare_exchange_u64(words, 4, 0, 1),
        lambda: load_u64(words.data.cast("B")[4:], 8),
    ):
        with pytest.raises(ValueError, match="not 8-byte aligned"):
            access()
    assert not words.any()


def test_short_and_read_only_buffers_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a buffer of 7 bytes"):
        load_u64(bytearray(7), 0)
    with pytest.raises(BufferError):
        store_u64(bytes(8), 0, 1)
    with pytest.raises(TypeError):
        store_u64(bytearray(8), 0, -1)
