"""What a memoryd counts; names and meanings are in :mod:`penstock.protocol.metrics.memory`."""

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
        """Report the memory's sizes, and its versions at every scrape."""
        for name, size in memory.spec.sizes().items():
            self._page.set("penstock_shm_segment_bytes", size, name.rpartition("-")[2])
        for kind, size in memory.huge_bytes().items():
            self._page.set("penstock_shm_huge_page_bytes", size, kind)
        control = memory.control
        self._page.ask("penstock_committed_step", lambda: float(control.committed))
        self._page.ask("penstock_memoryd_holds_model", lambda: float(control.incarnation != 0))

    def answered(self, kind: str, status: str) -> None:
        """A request was answered: for a lease, an agent, or an array of a block."""
        self._page.add("penstock_memoryd_requests", 1, kind, status)

    def malformed(self) -> None:
        """A message was no valid request."""
        self._page.add("penstock_memoryd_malformed_messages", 1)

    def served(self, num_bytes: int) -> None:
        """Bytes of a block were sent."""
        self._page.add("penstock_memoryd_served_bytes", num_bytes)

    def waiting(self, count: int) -> None:
        """So many requests are held back."""
        self._page.set("penstock_memoryd_waiting_requests", count)

    def leases(self, count: int) -> None:
        """So many living processes hold a lease."""
        self._page.set("penstock_memoryd_leases", count)

    def job_done(self, job: str, seconds: float) -> None:
        """A ``restore`` or ``save`` is over."""
        self._page.add("penstock_memoryd_job_seconds", seconds, job)
