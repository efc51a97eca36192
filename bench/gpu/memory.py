"""The machine's memory: how much there is, and having it all where it comes when it is used."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.workers.platforms.cuda.device import gpu_of
from penstock.workers.platforms.cuda.pinned import Registrations

GIB = 1 << 30
_SHARED = "/dev/shm/gpu-registered"
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python's mmap does not name."""


def meminfo(key: str) -> int:
    """Returns bytes by their name in /proc/meminfo.

    Raises:
        KeyError: it is not there.
    """
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(f"/proc/meminfo has no {key}")


def touch(num_bytes: int, within_s: float) -> int:
    """Fills memory for a moment, with a thread for each CPU, each GiB by one thread.

    Returns how much there was time for. To be called in a process of its own: it is the first that
    the kernel kills if memory is short.
    """
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    until_s = time.monotonic() + within_s
    libc = ctypes.CDLL(None, use_errno=True)
    pieces = [mmap.mmap(-1, GIB) for _ in range(num_bytes // GIB)]

    def populate(piece: mmap.mmap) -> bool:
        if time.monotonic() > until_s:
            return False
        start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(piece)))
        return bool(libc.madvise(start, ctypes.c_size_t(GIB), _POPULATE_WRITE) == 0)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return GIB * sum(pool.map(populate, pieces))


def waken(num_bytes: int, within_s: float, available: Callable[[], int] | None = None) -> int:
    """Touches memory until ``num_bytes`` are available or no more comes; returns the available
    bytes.

    Some virtual machines get their memory only on demand.
    """
    available = available or (lambda: meminfo("MemAvailable"))
    until_s = time.monotonic() + within_s
    there = available()
    while there < num_bytes and time.monotonic() < until_s:
        child = os.fork()
        if not child:
            try:
                touch(int(0.9 * there), until_s - time.monotonic())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        before, there = there, available()
        if there < 1.05 * before:
            break
    return there


@contextmanager
def registered(num_bytes: int) -> Iterator[torch.Tensor]:
    """Yields shared memory (flat uint8) that is registered with the driver, as in workers.

    Raises:
        CapacityError: the driver refuses; says what would do.
    """
    descriptor = os.open(_SHARED, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        area = mmap.mmap(descriptor, num_bytes)
    finally:
        os.unlink(_SHARED)
        os.close(descriptor)
    gpu = gpu_of(0)
    gpu.make_current()
    registrations = Registrations(gpu.register, gpu.unregister)
    registrations.add("shared memory", area)
    try:
        yield torch.frombuffer(area, dtype=torch.uint8).fill_(1)
    finally:
        gpu.synchronize()
        registrations.close()
