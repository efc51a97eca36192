"""Memory that emulated devices of a node swapped to each other, so that a device's account includes
bytes of its peers.

Each device writes to a small file of the run directory, which the workers of its node map. The file
has the last :data:`ENTRIES` swaps of each device::

    0      8     16        24
    bytes  peer  from      until     next entry …   fp64; times on the clock of time.monotonic

A device is the only writer of its part. The bytes are written last, and are 0 while the rest
changes; ``until`` is infinite until the swap is back.
"""

from __future__ import annotations

import mmap
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.host.files import make_directory, preallocate, writing

ENTRIES = 256
"""Swaps of a device that are remembered: more than it has out at a time."""

_FIELDS = 4


class PeerMemory:
    """The swaps between one node's devices; devices are numbered as in the plan."""

    def __init__(self, path: Path, num_devices: int, device: int) -> None:
        """Maps the file, and creates it if it does not exist. ``device``: the device that writes
        here.
        """
        size = num_devices * ENTRIES * _FIELDS * 8
        make_directory(path.parent)
        with writing(path, size), path.open("a+b") as file:
            preallocate(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)
        self._entries: NDArray[np.float64] = np.frombuffer(self._map, dtype=np.float64).reshape(
            num_devices, ENTRIES, _FIELDS
        )
        self._device = device
        self._own = self._entries[device % num_devices]
        self._next = 0
        self.clear()

    @classmethod
    def of_node(cls, run_dir: Path, node: str, num_devices: int, device: int) -> PeerMemory:
        """Returns the memory of a run's node."""
        return cls(run_dir / "emulated" / f"lodging-{node}", num_devices, device)

    def leave(self, peer: int, num_bytes: float, since: float) -> int:
        """Records that ``num_bytes`` are with a peer from ``since`` on; returns the number for
        :meth:`take_back`.
        """
        number, self._next = self._next, (self._next + 1) % ENTRIES
        entry = self._own[number]
        entry[0] = 0.0
        entry[1:] = peer, since, inf
        entry[0] = num_bytes
        return number

    def take_back(self, number: int, until: float) -> None:
        """Records that the swap is back."""
        self._own[number, 3] = until

    def bytes_here(self, begin: float, end: float) -> float:
        """Returns the most bytes that peers had left with the board's device at one time between
        ``begin`` and ``end``.
        """
        flat = self._entries.reshape(-1, _FIELDS)
        flat = flat[(flat[:, 1] == self._device) & (flat[:, 2] < end) & (flat[:, 3] > begin)]
        num_bytes, _, since, until = flat.T
        times = np.maximum(since, begin)[:, np.newaxis]
        present = (since <= times) & (times < until)
        return float((present @ num_bytes).max(initial=0.0))

    def clear(self) -> None:
        """Clears the device's swaps: its attempt is over."""
        self._own[...] = 0.0

    def close(self) -> None:
        """Unmaps the file."""
        del self._entries, self._own
        self._map.close()
