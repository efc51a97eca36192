"""Host memory for a GPU: which ranges are registered, what a refusal says, memory used again."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from penstock.host.errors import CapacityError
from penstock.models.gpu import CudaGpu
from penstock.workers.platforms.cuda import pinned
from penstock.workers.platforms.cuda.pinned import Registrations, StagingPool, pieces


class Driver:
    """Knows ranges as the CUDA driver would; the n-th registration can be made to fail."""

    def __init__(self, codes: tuple[int, ...] = ()) -> None:
        self.known: dict[int, int] = {}
        self._codes = list(codes)

    def register(self, address: int, num_bytes: int, read_only: bool = False) -> int:
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
    driver = Driver()
    registrations = Registrations(driver.register, driver.unregister)
    with mmap.mmap(-1, 6 * mmap.PAGESIZE) as segment:
        registrations.add("segment grads", segment, range(0, len(segment), mmap.PAGESIZE))
        assert list(driver.known.values()) == [2 * mmap.PAGESIZE] * 3
        assert registrations.num_bytes == 6 * mmap.PAGESIZE
        registrations.close()
        assert not driver.known


def test_nothing_is_pinned_where_that_was_asked_for() -> None:
    driver = Driver()
    registrations = Registrations(driver.register, driver.unregister, pins=False)
    with mmap.mmap(-1, mmap.PAGESIZE) as segment:
        registrations.add("segment grads", segment)
    assert not driver.known and registrations.num_bytes == 0


class Runtime:
    """The functions of CUDA's runtime that torch has."""

    def __init__(self, *codes: int) -> None:
        self.calls: list[str] = []
        self._codes = list(codes)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(f"register {address}")
        return self._codes.pop(0) if self._codes else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(f"unregister {address}")
        return 0


def test_devices_of_a_process_pin_a_range_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second registration is an error, which CUDA would keep for some later kernel."""
    runtime = Runtime(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    first, second = CudaGpu(torch.device("cpu")), CudaGpu(torch.device("cpu"))
    assert first.register(4096, 8) == 2, "refused"
    assert [gpu.register(4096, 8) for gpu in (first, second)] == [0, 0]
    assert [gpu.unregister(4096) for gpu in (second, first)] == [0, 0]
    assert runtime.calls == ["register 4096"] * 2 + ["unregister 4096"]


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
