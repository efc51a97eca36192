"""Pins the optimizer's threads to their cores, unless another run has claimed the cores.

Each core for a single thread is claimed on the machine (:mod:`penstock.host.core_locks`). Two runs
with threads pinned to the same core would each have half of it while other cores are idle. So the
second run leaves the placement of its threads to the kernel; their number stays the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock._native import Pool
from penstock.host.core_locks import Claim
from penstock.host.topology import format_cpus

_log = logging.getLogger("penstock.optimizer")


@contextmanager
def open_pool(cores: Sequence[int]) -> Iterator[tuple[Pool, frozenset[int]]]:
    """Yields a pool of a thread for each of ``cores``, pinned to it if they are all free, and the
    threads' ids.
    """
    claim = Claim.of(f"cpu-{core}" for core in cores)
    before = _threads()
    with Pool(cores) as pool:
        threads = frozenset(_threads() - before)
        if claim is None:
            _unpin(threads)
            _log.warning(
                "another run on this machine has pinned threads to some of the cores %s: this"
                " run's optimizer leaves its %d threads to the kernel; optimizer.cores, or"
                " taskset, gives each run cores of its own",
                format_cpus(cores),
                len(cores),
            )
        try:
            yield pool, threads
        finally:
            if claim is not None:
                claim.release()


def _threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def _unpin(threads: frozenset[int]) -> None:
    allowed = os.sched_getaffinity(0)
    for thread in threads:
        os.sched_setaffinity(thread, allowed)
