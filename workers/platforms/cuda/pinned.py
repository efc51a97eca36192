"""Host memory registered with the driver, so that copies run at full speed concurrent with the
computation.

Segments are registered at their attachment, never inside a step: registration takes about 0.1 s per
GB. Pieces have at most 64 GiB, because one registration of 512 GiB fails on common drivers. Cuts
are at starts of arrays, because the driver refuses a copy with a host side across registrations.
Messages are staged in memory of their exact size; torch's pinned allocator would round each up to a
power of two, and never free it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import resource
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch

from penstock.host.errors import CapacityError

REGISTER_BYTES = 64 << 30

Register = Callable[[int, int, bool], int]
"""Makes (address, bytes) known to the driver, for reading only or not; returns its error code, 0 if
none.
"""

Unregister = Callable[[int], int]
"""Unregisters the range at an address; returns the driver's error code, 0 if none."""

_log = logging.getLogger(__name__)

_PAGE_BYTES = mmap.PAGESIZE
_NOT_SUPPORTED = 801


def pieces(starts: Iterable[int], num_bytes: int, most: int) -> list[tuple[int, int]]:
    """Cuts a segment into ranges (start, stop) of at most ``most`` bytes, at starts of arrays only.

    A longer array is a piece of its own.
    """
    ranges, begin, last = [], 0, 0
    for start in (*sorted(starts), num_bytes):
        if start - begin > most and last > begin:
            ranges.append((begin, last))
            begin = last
        last = start
    return [*ranges, (begin, num_bytes)]


class Registrations:
    """Ranges of host memory that are registered until :meth:`close`; none unless ``pins``."""

    def __init__(self, register: Register, unregister: Unregister, *, pins: bool = True) -> None:
        self._pins = pins
        self._register = register
        self._unregister = unregister
        self._addresses: list[int] = []
        self.num_bytes = 0

    def add(self, what: str, buffer: memoryview | mmap.mmap, starts: Iterable[int] = ()) -> None:
        """Registers a buffer in :func:`pieces`; ``what`` names it in errors.

        Raises:
            CapacityError: the driver refuses; the message names a remedy.
        """
        if not self._pins:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for start, stop in pieces(starts, len(buffer), REGISTER_BYTES):
            code = self._register(address + start, stop - start, False)
            if code:
                raise _refusal(code, what, stop - start, self.num_bytes)
            self._addresses.append(address + start)
            self.num_bytes += stop - start

    def add_read_only(self, what: str, buffer: memoryview, ranges: Iterable[range]) -> None:
        """Registers ranges of memory that this process may only read. Where the driver cannot, they
        stay as they are, and copies from them are slower.
        """
        if not self._pins:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        for place in ranges:
            code = self._register(address + place.start, len(place), True)
            if code:
                _log.warning(
                    "%s: the driver did not register %d bytes for reading (CUDA error %d), so"
                    " copies are slower; memory.share_base: never does without such memory",
                    *(what, len(place), code),
                )
                return
            self._addresses.append(address + place.start)
            self.num_bytes += len(place)

    def close(self) -> None:
        """Unregisters everything; must come before the memory is unmapped."""
        while self._addresses:
            code = self._unregister(self._addresses.pop())
            if code:  # no remedy exists: the memory is unmapped next, or the process ends
                _log.warning("the driver did not unregister host memory (CUDA error %d)", code)
        self.num_bytes = 0


def _refusal(code: int, what: str, num_bytes: int, before: int) -> CapacityError:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    advice = (
        "it cannot register shared memory (WSL, some virtual GPUs): use another machine, or"
        " cluster.pin_memory: false, with which copies are slower"
        if code == _NOT_SUPPORTED
        else f"raise the limit of locked memory (now {shown}: ulimit -l unlimited,"
        " LimitMEMLOCK=infinity for systemd, --ulimit memlock=-1 for containers), and see that so"
        " much host memory is free; or cluster.pin_memory: false, with which copies are slower"
    )
    return CapacityError(
        f"{what}: the driver refused to register {num_bytes} bytes of host memory after"
        f" {before} (CUDA error {code}); {advice}"
    )


class StagingPool:
    """Registered memory in whole pages, reused after the last tensor over it is gone. Per size it
    keeps as much as was in use at once: messages of a plan have few sizes.
    """

    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns a flat uint8 tensor, uninitialized.

        No copy by the device may be in progress when the last reference to it is dropped.
        """
        size = max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES
        free = self._free.setdefault(size, [])
        try:
            area = free.pop()
        except IndexError:
            area = mmap.mmap(-1, size)
            self._registrations.add("staging memory for messages", area)
        array = np.frombuffer(area, np.uint8, num_bytes)
        # The tensor's storage holds the array for all views. Lists are appended to without a lock,
        # since a garbage collection may append at any point.
        weakref.finalize(array, free.append, area).atexit = False
        return torch.from_numpy(array)
