"""Prometheus metrics of optimizerd, and a look at where the pages of the optimizer's state lie.

memoryd places the pages when it makes the segments; a segment that was adopted may stem from a run
with other cores.
"""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from penstock.protocol.plan.placement import Placement, page_places
from penstock.protocol.run.metrics import LateGauge
from penstock.shm.layout import PAGE_BYTES, SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.pages import NodeRange, nodes_of_pages

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

MAX_SAMPLES = 4096
"""Pages that are asked for, spread evenly: the kernel takes a while for each."""

_log = logging.getLogger(__name__)


class OptimizerMetrics:
    """One set of metrics in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sweep_seconds = Histogram(
            "penstock_optimizer_pass_seconds",
            "Time of one sweep over one block.",
            ["pass"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._parameters = Counter(
            "penstock_optimizer_parameters",
            "Parameters that sweeps went through, padding included.",
            ["pass"],
            registry=registry,
        )
        self._throughput = Gauge(
            "penstock_optimizer_parameters_per_second",
            "Speed of the last sweep.",
            ["pass"],
            registry=registry,
        )
        self.queue_length = Gauge(
            "penstock_optimizer_queue_length",
            "Blocks that wait for their sweep.",
            registry=registry,
        )
        self.committed_version = Gauge(
            "penstock_optimizer_committed_version",
            "Version that the control segment says is committed.",
            registry=registry,
        )
        self._epochs = Counter(
            "penstock_optimizer_epochs", "Epochs taken part in.", registry=registry
        )
        self._epoch = 0
        self.pulled_bytes = Counter(
            "penstock_optimizer_pulled_bytes",
            "Gradients fetched from other nodes.",
            registry=registry,
        )
        self._fetched = Counter(
            "penstock_optimizer_fetched_bytes",
            "The same, by the way they came: from memoryds (zmq), read from their memory (nixl).",
            ["way"],
            registry=registry,
        )
        self.dropped_messages = Counter(
            "penstock_optimizer_dropped_messages",
            "Messages on the local socket that were not obeyed.",
            ["reason"],
            registry=registry,
        )
        self._make_placement(registry)

    def fetched(self, way: str, num_bytes: int, seconds: float) -> None:
        """Gradients of another node have come, by ``zmq`` or ``nixl``."""
        self._fetched.labels(way).inc(num_bytes)

    def _make_placement(self, registry: CollectorRegistry) -> None:
        self._placement = Info(
            "penstock_optimizer_placement",
            "Cores of the optimizer's threads, NUMA nodes of these, and the workers' cores.",
            registry=registry,
        )
        self._threads = Gauge(
            "penstock_optimizer_threads",
            "Threads pinned to cores.",
            ["numa_node"],
            registry=registry,
        )
        self._local = LateGauge(
            "penstock_optimizer_local_state_ratio",
            "Share of the state's pages (a sample, at start) that lie on the NUMA node of the"
            " thread that works on them, where the kernel says so.",
            registry,
        )
        self._huge_bytes = Gauge(
            "penstock_optimizer_huge_page_bytes",
            "Mapped shared memory that lay in huge pages at start.",
            registry=registry,
        )

    def placed(self, placement: Placement, local: float | None, huge_bytes: int) -> None:
        """Record where threads and memory are. ``local``: the share of the state's pages that lie
        on the NUMA node of their thread, None where it is not known.
        """
        self._placement.info(placement.to_dict())
        for node in sorted(set(placement.nodes)):
            self._threads.labels(str(node)).set(placement.nodes.count(node))
        if local is not None:
            self._local.set(local)
        self._huge_bytes.set(huge_bytes)

    def in_epoch(self, epoch: int) -> None:
        """Count the epoch if it is a new one."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._epochs.inc()

    def sweep_done(self, name: str, seconds: float, num_parameters: int) -> None:
        """Count one sweep of ``num_parameters`` parameters, padding included."""
        self._sweep_seconds.labels(name).observe(seconds)
        self._parameters.labels(name).inc(num_parameters)
        if seconds > 0:
            self._throughput.labels(name).set(num_parameters / seconds)


def local_ratio(memory: NodeMemory, placement: Placement) -> float | None:
    """Returns the share of the state's pages (0 to 1) that lie where :func:`page_places` wants
    them, or None where the kernel does not say.
    """
    buffer = memory.segment_buffer(SegmentKind.STATE)
    spec = memory.spec
    wanted = _sample(page_places(placement, spec.layout, spec.table)[SegmentKind.STATE])
    if buffer is None or not wanted:
        return None
    try:
        found = nodes_of_pages(buffer, list(wanted))
    except OSError as error:
        _log.info("where the state's pages lie is not known: %s", error)
        return None
    known = [
        node == wanted[offset]
        for offset, node in zip(wanted, found, strict=True)
        if node is not None
    ]
    return sum(known) / len(known) if known else None


def _sample(ranges: list[NodeRange]) -> dict[int, int]:
    """Returns a sample of pages: offset in bytes -> the NUMA node that the page belongs on."""
    step = -(-sum(wanted.num_bytes for wanted in ranges) // MAX_SAMPLES // PAGE_BYTES) * PAGE_BYTES
    return {
        offset: wanted.node
        for wanted in ranges
        for offset in range(wanted.offset, wanted.offset + wanted.num_bytes, max(step, PAGE_BYTES))
    }
