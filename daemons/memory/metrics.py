"""Counts a memoryd's metrics; :mod:`penstock.protocol.metrics.memory` describes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.protocol.metrics.memory import MEMORY
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.shm.memory import NodeMemory


class MemoryMetrics:
    """The page of one memoryd; its loop and the block server write it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._page = MetricRegistry(MEMORY, registry)

    def watch(self, memory: NodeMemory) -> None:
        """Reports the memory's sizes, and its versions at every scrape."""
        for name, size in memory.spec.sizes().items():
            self._page.set("penstock_shm_segment_bytes", size, name.rpartition("-")[2])
        for kind, size in memory.huge_bytes().items():
            self._page.set("penstock_shm_huge_page_bytes", size, kind)
        self._page.set("penstock_shm_base_bytes", sum(memory.spec.base_sizes().values()))
        control = memory.control
        self._page.ask("penstock_committed_step", lambda: float(control.committed))
        self._page.ask("penstock_memoryd_holds_model", lambda: float(control.incarnation != 0))

    def answered(self, kind: str, status: str) -> None:
        """Counts an answered request for a lease, an agent, or an array of a block."""
        self._page.add("penstock_memoryd_requests", 1, kind, status)

    def malformed(self) -> None:
        """Counts an invalid message."""
        self._page.add("penstock_memoryd_malformed_messages", 1)

    def served(self, num_bytes: int) -> None:
        """Counts sent bytes of a block."""
        self._page.add("penstock_memoryd_served_bytes", num_bytes)

    def waiting(self, count: int) -> None:
        """Reports the number of requests that are held back."""
        self._page.set("penstock_memoryd_waiting_requests", count)

    def leases(self, count: int) -> None:
        """Reports the number of living processes with a lease."""
        self._page.set("penstock_memoryd_leases", count)

    def job_done(self, job: str, seconds: float) -> None:
        """Notes the end of a ``restore`` or ``save``."""
        self._page.add("penstock_memoryd_job_seconds", seconds, job)
