"""Traffic of an emulated cluster: on the memory of a node, and between nodes.

Devices announce their copies through a node's memory, and the optimizer has what these leave
(:class:`BandwidthLog`). Between nodes each NIC serves one transfer after the other
(:class:`NicReservations`).

Workers write, the node's optimizerd reads, both through a small file in the run directory that they
map. Of each device the last :data:`ENTRIES` copies::

    0     8    16          24
    start end  bytes/s     next entry …     fp64, clock of time.monotonic

A device is the only writer of its part. The rate is written last, and is 0 while the rest changes.
"""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.host import world
from penstock.host.files import make_directory, preallocate, writing

ENTRIES = 128
"""Copies of a device that are remembered."""

_FIELDS = 3
_PART_S = 1e-3
"""Seconds of a read that occupies a NIC in one piece."""

_TURN_S = 1e-2
"""Seconds after the previous read within which arriving bytes count as having waited for their
turn.
"""

_LEAST_SHARE = 0.05
"""Share of memory bandwidth that the optimizer always gets, however much is copied."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: from when to when on the clock, at how many bytes/s."""

    start: float
    end: float
    rate: float


class BandwidthLog:
    """The copies of one node's devices."""

    def __init__(self, path: Path, num_devices: int) -> None:
        """Maps the file, and creates it if it does not exist."""
        size = num_devices * ENTRIES * _FIELDS * 8
        make_directory(path.parent)
        with writing(path, size), path.open("a+b") as file:
            preallocate(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)
        self._entries: NDArray[np.float64] = np.frombuffer(self._map, dtype=np.float64).reshape(
            num_devices, ENTRIES, _FIELDS
        )
        self._next = [0] * num_devices

    @classmethod
    def of_node(cls, run_dir: Path, node: str, num_devices: int) -> BandwidthLog:
        """Returns the log of a run's node."""
        return cls(run_dir / "emulated" / f"traffic-{node}", num_devices)

    def post(self, device: int, copy: Copy) -> None:
        """Announces a copy of a device, counted in its node."""
        entry = self._entries[device, self._next[device]]
        self._next[device] = (self._next[device] + 1) % ENTRIES
        entry[2] = 0.0
        entry[0], entry[1] = copy.start, copy.end
        entry[2] = copy.rate

    def since(self, at: float) -> list[Copy]:
        """Copies that end after ``at``."""
        flat = self._entries.reshape(-1, _FIELDS)
        copies = flat[(flat[:, 1] > at) & (flat[:, 2] > 0.0)]
        return [Copy(*entry) for entry in copies.tolist()]

    def clear(self) -> None:
        """Forgets all copies: the clock may have restarted."""
        self._entries[...] = 0.0

    def close(self) -> None:
        """Unmaps the file."""
        del self._entries
        self._map.close()


class NicReservations:
    """Times at which each node's NIC is free, for all processes of an emulated cluster. They map
    and lock a file in the run directory::

        0   8
        out in    of node 0, fp64, clock of time.monotonic; then of node 1, …

    Transfers go one after the other: together they take as long as if they shared the NIC.
    """

    def __init__(self, path: Path, num_nodes: int) -> None:
        """Maps the file, and creates it if it does not exist."""
        make_directory(path.parent)
        with writing(path, num_nodes * 16):
            self._file = path.open("a+b")
            preallocate(self._file.fileno(), num_nodes * 16)
        self._map = mmap.mmap(self._file.fileno(), num_nodes * 16)
        self._free_at: NDArray[np.float64] = np.frombuffer(self._map, dtype=np.float64)
        self._mutex = world.lock()  # for threads: they share the descriptor, and so its flock

    @classmethod
    def of_run(cls, run_dir: Path, num_nodes: int) -> NicReservations:
        """Returns the reservations of a run."""
        return cls(run_dir / "emulated" / "nics", num_nodes)

    def occupy(
        self, ready_at: float, seconds: float, *, source: int | None, target: int | None
    ) -> tuple[float, float]:
        """Returns start and end of a transfer that could start at ``ready_at``. A side with node
        ``None`` is not waited for.
        """
        ends = [2 * source] if source is not None else []
        ends += [2 * target + 1] if target is not None else []
        with self._mutex:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                start = max([ready_at, *self._free_at[ends].tolist()])
                self._free_at[ends] = start + seconds
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return start, start + seconds

    def clear(self, node: int) -> None:
        """Marks a node's NIC as free: the clock may have restarted."""
        self._free_at[2 * node : 2 * node + 2] = 0.0

    def close(self) -> None:
        """Unmaps the file."""
        del self._free_at
        self._map.close()
        self._file.close()


class NodeReads:
    """Delays reads of other nodes' memory by their time on the reading node's NIC. The delay is
    split, so that messages pass between its pieces. (The NIC of the other node is assumed to be
    free.)
    """

    def __init__(self, board: NicReservations, node: int, bytes_per_s: float) -> None:
        """Creates the delay. ``bytes_per_s``: stored bytes per second of the clock."""
        self.board = board
        self.node = node
        self.bytes_per_s = bytes_per_s
        self._ended_at = 0.0

    def __call__(self, num_bytes: int, cancelled: Callable[[], bool]) -> None:
        """Waits until ``num_bytes`` that just arrived would have arrived on the NIC. Called on one
        thread at a time.
        """
        now = world.monotonic()
        waited_for_turn = now - self._ended_at < _TURN_S
        left_s, end = num_bytes / self.bytes_per_s, self._ended_at if waited_for_turn else now
        while left_s > 0.0 and not cancelled():
            part_s = min(left_s, _PART_S)
            _, end = self.board.occupy(end, part_s, source=None, target=self.node)
            world.sleep(max(0.0, end - world.monotonic()))
            left_s -= part_s
        self._ended_at = end


def finish_at(
    start: float, num_bytes: float, *, limit: float, capacity: float, copies: Sequence[Copy]
) -> float:
    """Returns the end of a sweep that moves ``num_bytes``. The sweep gets the memory bandwidth
    ``capacity`` that copies leave, and ``limit`` at most.

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
