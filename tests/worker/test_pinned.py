"""Host memory for a GPU: which ranges are registered, what a refusal says, memory used again."""

from __future__ import annotations

import gc
import mmap

import pytest

from penstock.protocol.errors import CapacityError
from penstock.workers.platforms.cuda import pinned
from penstock.workers.platforms.cuda.pinned import Registrations, StagingPool, pieces


class Driver:
    """Knows ranges as the CUDA driver would; the n-th registration can be made to fail."""

    def __init__(self, codes: tuple[int, ...] = ()) -> None:
        self.known: dict[int, int] = {}
        self._codes = list(codes)

    def register(self, address: int, num_bytes: int) -> int:
        code = self._codes.pop(0) if self._codes else 0
        if not code:
            self.known[address] = num_bytes
        return code

    def unregister(self, address: int) -> int:
        del self.known[address]
        return 0


@pytest.mark.parametrize(
    ("starts", "num_bytes", "expected"),
    [
        ((0, 10, 20, 30), 40, [(0, 20), (20, 40)]),
        ((0, 10, 20), 25, [(0, 25)]),
        ((0, 10), 100, [(0, 10), (10, 100)]),  # no array is cut, however long
        ((), 30, [(0, 30)]),
        ((20, 0, 10), 40, [(0, 20), (20, 40)]),
    ],
)
def test_segments_are_cut_where_arrays_start(
    starts: tuple[int, ...], num_bytes: int, expected: list[tuple[int, int]]
) -> None:
    """A copy that reached from one registration into the next would be refused."""
    assert pieces(starts, num_bytes, 25) == expected


def test_all_pieces_are_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "REGISTER_BYTES", 2 * mmap.PAGESIZE)
    driver = Driver((0, 712))  # the second is registered by another device of this process
    registrations = Registrations(driver.register, driver.unregister)
    with mmap.mmap(-1, 6 * mmap.PAGESIZE) as segment:
        registrations.add("segment grads", segment, range(0, len(segment), mmap.PAGESIZE))
        assert list(driver.known.values()) == [2 * mmap.PAGESIZE] * 2
        assert registrations.num_bytes == 4 * mmap.PAGESIZE
        registrations.close()
        assert not driver.known


@pytest.mark.parametrize(
    ("code", "advice"), [(2, r"limit of locked memory \(now .*--ulimit memlock"), (801, "WSL")]
)
def test_a_refusal_says_what_to_do(code: int, advice: str) -> None:
    driver = Driver((code,))
    registrations = Registrations(driver.register, driver.unregister)
    with (
        mmap.mmap(-1, mmap.PAGESIZE) as segment,
        pytest.raises(CapacityError, match=rf"segment weights: .*CUDA error {code}\); .*{advice}"),
    ):
        registrations.add("segment weights", segment)


def test_staging_memory_is_used_again_when_no_tensor_is_left() -> None:
    driver = Driver()
    pool = StagingPool(Registrations(driver.register, driver.unregister))
    first = pool.take(10)
    view, place = first[2:4], first.data_ptr()
    assert (first.numel(), list(driver.known)) == (10, [place])
    del first
    gc.collect()
    assert pool.take(10).data_ptr() != place, "a view is left"
    del view
    gc.collect()
    assert pool.take(mmap.PAGESIZE).data_ptr() in driver.known
    assert list(driver.known.values()) == [mmap.PAGESIZE] * 2
