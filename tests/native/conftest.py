"""Shared pieces of the native tests: aligned arrays, blocks with known content, cores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import _native

BYTES_OF = {
    _native.WeightsDtype.FLOAT32: np.float32,
    _native.WeightsDtype.BFLOAT16: np.uint16,
    _native.WeightsDtype.FLOAT16: np.uint16,
}


def aligned(num_elements: int, dtype: Any) -> NDArray[Any]:
    """Zeros that start at a multiple of 64 bytes."""
    num_bytes = num_elements * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype)


def aligned_copy(values: NDArray[Any]) -> NDArray[Any]:
    """The same values at a multiple of 64 bytes."""
    copy = aligned(values.size, values.dtype)
    copy[:] = values
    return copy


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Truncate finite floats to bf16 bit patterns."""
    return aligned_copy((values.view(np.uint32) >> 16).astype(np.uint16))


@dataclass(slots=True, kw_only=True)
class Block:
    """One block's arrays, its ranges and an undo area."""

    master: NDArray[np.float32]
    exp_avg: NDArray[np.float32]
    exp_avg_sq: NDArray[np.float32]
    ranges: list[tuple[int, int, float, float]]
    undo: NDArray[np.uint8]

    @classmethod
    def random(cls, num_elements: int, seed: int) -> Block:
        """State as after some steps, and up to three ranges of different decay and rate."""
        rng = np.random.default_rng(seed)
        cuts = sorted(
            {0, num_elements, *(rng.integers(0, num_elements // 16 + 1, 2) * 16).tolist()}
        )
        return cls(
            master=aligned_copy(rng.standard_normal(num_elements, np.float32)),
            exp_avg=aligned_copy(rng.standard_normal(num_elements, np.float32) * np.float32(0.1)),
            exp_avg_sq=aligned_copy(rng.random(num_elements, np.float32) * np.float32(0.01)),
            ranges=[
                (start, end, 0.1 * index, 1.0 / (1 + index))
                for index, (start, end) in enumerate(itertools.pairwise(cuts))
            ],
            undo=aligned(_native.undo_bytes(4), np.uint8),
        )

    def copy(self) -> Block:
        """An independent block with the same content."""
        return Block(
            master=aligned_copy(self.master),
            exp_avg=aligned_copy(self.exp_avg),
            exp_avg_sq=aligned_copy(self.exp_avg_sq),
            ranges=list(self.ranges),
            undo=aligned_copy(self.undo),
        )

    @property
    def state(self) -> dict[str, Any]:
        """Keyword arguments of every sweep over model state."""
        return {
            "master": self.master,
            "arrays": [self.exp_avg, self.exp_avg_sq],
            "ranges": self.ranges,
        }

    @property
    def arrays(self) -> dict[str, Any]:
        """Keyword arguments of repair."""
        return {name: array for name, array in self.state.items() if name != "ranges"}

    @property
    def each(self) -> tuple[NDArray[np.float32], ...]:
        """Master and the optimizer's arrays."""
        return self.master, self.exp_avg, self.exp_avg_sq

    def bits(self) -> tuple[bytes, bytes, bytes]:
        """Master and state, to compare byte for byte."""
        return self.master.tobytes(), self.exp_avg.tobytes(), self.exp_avg_sq.tobytes()


@dataclass(slots=True, eq=False)
class Kit:
    """What test modules would import from here, were they packages. ``earlier``: pool threads that
    the process had before the test.
    """

    aligned: Callable[[int, Any], NDArray[Any]] = aligned
    aligned_copy: Callable[[NDArray[Any]], NDArray[Any]] = aligned_copy
    bf16_bits: Callable[[NDArray[np.float32]], NDArray[np.uint16]] = bf16_bits
    block: Callable[[int, int], Block] = Block.random
    earlier: frozenset[str] = frozenset()

    @staticmethod
    def hyper(step: int = 3, **changes: Any) -> _native.Hyper:
        """Usual hyper-parameters with changes."""
        usual = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": step}
        return _native.Hyper(**(usual | changes))

    @staticmethod
    def weights(num_elements: int, dtype: _native.WeightsDtype) -> NDArray[Any]:
        """Room for the weights of a block."""
        return aligned(num_elements, BYTES_OF[dtype])

    @staticmethod
    def gradients(
        num_elements: int, seed: int, *, bf16: bool, count: int = 1
    ) -> list[NDArray[Any]]:
        """Contributions with values around 1."""
        rng = np.random.default_rng(seed)
        values = [rng.standard_normal(num_elements, np.float32) for _ in range(count)]
        return [bf16_bits(v) if bf16 else aligned_copy(v) for v in values]

    def num_pool_threads(self) -> int:
        """Threads of pools that the test has started. An earlier test of the process may have a
        pool in a cycle, which lives until the next collection.
        """
        return len(self.pool_threads() - self.earlier)

    @staticmethod
    def pool_threads() -> frozenset[str]:
        """Ids of this process's threads that belong to pools."""
        ids = set()
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                if (task / "comm").read_text().startswith("sweeps-core"):
                    ids.add(task.name)
        return frozenset(ids)


@pytest.fixture(scope="session")
def kit() -> Kit:
    """Helpers; session-wide so that hypothesis tests may use them."""
    return Kit()


@pytest.fixture(scope="session")
def cores() -> list[int]:
    """Cores this process may use."""
    return sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def no_thread_left(kit: Kit) -> Iterator[None]:
    """Fail a test that leaves a pool's thread behind."""
    kit.earlier = kit.pool_threads()
    yield
    assert kit.num_pool_threads() == 0


@pytest.fixture
def pool(cores: list[int]) -> Iterator[_native.Pool]:
    """Two threads on the fastest path."""
    with _native.Pool([cores[0], cores[-1]]) as pool:
        yield pool
