"""Traffic on the memory of an emulated node: copies that devices announce, and what is left for the
optimizer.

Workers write, the node's optimizerd reads, both through a small file in the run directory that they
map. Of each device the last :data:`ENTRIES` copies::

    0     8    16          24
    start end  bytes/s     next entry …     fp64, clock of time.monotonic

A device is the only writer of its part. The rate is written last, and is 0 while the rest changes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ENTRIES = 128
"""Copies of a device that are remembered."""

_FIELDS = 3
_LEAST_SHARE = 0.05
"""Of memory bandwidth: what the optimizer gets however much is copied."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: from when to when on the clock, at how many bytes/s."""

    start: float
    end: float
    rate: float


class TrafficBoard:
    """The copies of one node's devices."""

    def __init__(self, path: Path, num_devices: int) -> None:
        """Map the file; made if it is not there."""
        size = num_devices * ENTRIES * _FIELDS * 8
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._entries: NDArray[np.float64] = np.frombuffer(self._map, dtype=np.float64).reshape(
            num_devices, ENTRIES, _FIELDS
        )
        self._next = [0] * num_devices

    @classmethod
    def of_node(cls, run_dir: Path, node: str, num_devices: int) -> TrafficBoard:
        """That of a run's node."""
        return cls(run_dir / "emulated" / f"traffic-{node}", num_devices)

    def post(self, device: int, copy: Copy) -> None:
        """Announce a copy of a device, counted in its node."""
        entry = self._entries[device, self._next[device]]
        self._next[device] = (self._next[device] + 1) % ENTRIES
        entry[2] = 0.0
        entry[0], entry[1] = copy.start, copy.end
        entry[2] = copy.rate

    def since(self, at: float) -> list[Copy]:
        """Copies that end after ``at``."""
        flat = self._entries.reshape(-1, _FIELDS)
        found = flat[(flat[:, 1] > at) & (flat[:, 2] > 0.0)]
        return [Copy(*entry) for entry in found.tolist()]

    def clear(self) -> None:
        """Forget all copies: the clock may have started anew."""
        self._entries[...] = 0.0

    def close(self) -> None:
        """Unmap."""
        del self._entries
        self._map.close()


def finish_at(
    start: float, num_bytes: float, *, limit: float, capacity: float, copies: Sequence[Copy]
) -> float:
    """When a pass that moves ``num_bytes`` ends: it has what copies leave of the memory bandwidth
    ``capacity``, and ``limit`` at most.

    Copies come first because each asks for less than an equal share.
    """
    bounds = sorted({at for copy in copies for at in (copy.start, copy.end) if at > start})
    now, left = start, num_bytes
    for bound in (*bounds, np.inf):
        taken = sum(copy.rate for copy in copies if copy.start <= now < copy.end)
        rate = min(limit, max(capacity - taken, _LEAST_SHARE * capacity))
        if left <= rate * (bound - now):
            return float(now + left / rate)
        left -= rate * (bound - now)
        now = bound
    raise AssertionError("the last bound is infinite")
