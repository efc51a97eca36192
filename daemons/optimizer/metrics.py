"""Counts optimizerd's metrics (:mod:`penstock.protocol.metrics.optimizer` describes them), and
locates the pages of the optimizer's state.

memoryd places the pages when it creates the segments; an adopted segment may stem from a run with
other cores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from penstock.host import world
from penstock.protocol.metrics.optimizer import OPTIMIZER
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.run.hardware.placement import Placement, page_places
from penstock.shm.layout import PAGE_BYTES, SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.pages import NodeRange, nodes_of_pages

MAX_SAMPLES = 4096
"""Pages that are asked for, spread evenly: the kernel takes a while for each."""

_log = logging.getLogger(__name__)


class OptimizerMetrics:
    """The page of one optimizerd."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = world.perf_counter
    ) -> None:
        self._page = MetricRegistry(OPTIMIZER, registry)
        self._page.refreshed_by(self._refresh)
        self._clock = clock
        self._waits: tuple[str | None, float] = None, clock()
        self._threads: Sequence[int] = ()
        self._num_threads = 0
        self._cpu_s = 0.0
        self._lock = world.lock()

    def fetched(self, way: str, num_bytes: int, seconds: float) -> None:
        """Counts gradients fetched from another node, by ``zmq`` or ``nixl``."""
        self._page.add("penstock_fetch_bytes", num_bytes, way)
        self._page.add("penstock_fetch_seconds", seconds, way)

    def dropped(self, reason: str) -> None:
        """Counts a dropped message."""
        self._page.add("penstock_dropped_messages", 1, reason)

    def placed(self, placement: Placement, local: float | None, huge_bytes: int) -> None:
        """Records the places of threads and memory. ``local``: the share of the state's pages on
        the NUMA node of their thread; None if unknown.
        """
        self._page.say("penstock_optimizer_placement", placement.to_dict())
        for node in sorted(set(placement.nodes)):
            count = placement.nodes.count(node)
            self._page.set("penstock_optimizer_threads", count, str(node))
        if local is not None:
            self._page.set("penstock_optimizer_local_state_ratio", local)
        self._page.set("penstock_optimizer_huge_page_bytes", huge_bytes)

    def runs_on(self, num_threads: int, threads: Sequence[int]) -> None:
        """Sweeps run on so many threads. Of ``threads`` (ids of the kernel; none where sweeps take
        time without work) CPU time is counted.
        """
        self._page.set("penstock_optimizer_cores", num_threads)
        self._num_threads, self._threads = num_threads, tuple(threads)

    def ceiling(self, bytes_per_s: float) -> None:
        """Records the measured bandwidth of memory."""
        self._page.set("penstock_memory_bandwidth_ceiling_bytes_per_second", bytes_per_s)

    def waits(self, cause: str | None, queue_length: int) -> None:
        """Starts a wait of the sweeps for ``cause``; None: a sweep runs."""
        self._page.set("penstock_optimizer_queue_length", queue_length)
        with self._lock:
            self._count_wait(cause)

    def sweep_done(self, name: str, seconds: float, parameters: float, num_bytes: float) -> None:
        """Counts one sweep: parameters, padding included, and bytes of DRAM."""
        self._page.add("penstock_sweep_seconds", seconds, name)
        self._page.add("penstock_sweep_parameters", parameters, name)
        self._page.add("penstock_sweep_bytes", num_bytes, name)
        self._page.add("penstock_optimizer_busy_seconds", seconds * self._num_threads)

    def _refresh(self) -> None:
        """Adds the current wait, and updates the CPU time."""
        with self._lock:
            self._count_wait(self._waits[0])
            if self._threads:
                cpu_s = sum(map(cpu_seconds, self._threads))
                self._page.add("penstock_optimizer_cpu_seconds", max(0.0, cpu_s - self._cpu_s))
                self._cpu_s = max(cpu_s, self._cpu_s)

    def _count_wait(self, now_for: str | None) -> None:
        now_s = self._clock()
        cause, since_s = self._waits
        if cause is not None:
            self._page.add("penstock_optimizer_wait_seconds", now_s - since_s, cause)
        self._waits = now_for, now_s


def cpu_seconds(thread: int) -> float:
    """Returns the CPU time of a thread of this process by the kernel's id; 0 once it has ended."""
    try:
        # The kernel's layout of a clock's id: inverted thread id, per thread, what it ran.
        return time.clock_gettime(~thread << 3 | 6)
    except OSError:
        return 0.0


def local_ratio(memory: NodeMemory, placement: Placement) -> float | None:
    """Returns the share of the state's pages (0 to 1) that lie where :func:`page_places` wants
    them, or None where the kernel does not say.
    """
    buffer = memory.segment_buffer(SegmentKind.STATE)
    spec = memory.spec
    sample = _sample(page_places(placement, spec.layout, spec.table)[SegmentKind.STATE])
    if buffer is None or not sample:
        return None
    try:
        nodes = nodes_of_pages(buffer, list(sample))
    except OSError as error:
        _log.info("where the state's pages lie is not known: %s", error)
        return None
    known = [
        node == sample[offset]
        for offset, node in zip(sample, nodes, strict=True)
        if node is not None
    ]
    return sum(known) / len(known) if known else None


def _sample(ranges: list[NodeRange]) -> dict[int, int]:
    """Returns a sample of pages: offset in bytes -> the NUMA node that the page belongs on."""
    step = (
        -(-sum(node_range.num_bytes for node_range in ranges) // MAX_SAMPLES // PAGE_BYTES)
        * PAGE_BYTES
    )
    return {
        offset: node_range.node
        for node_range in ranges
        for offset in range(
            node_range.offset, node_range.offset + node_range.num_bytes, max(step, PAGE_BYTES)
        )
    }
