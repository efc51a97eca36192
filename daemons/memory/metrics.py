"""Prometheus metrics of memoryd. Names carry their unit and the prefix ``penstock_memoryd_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.shm.memory import NodeMemory


class MemoryMetrics:
    """Written by the service and the block server; each metric has one writing thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "penstock_memoryd_requests",
            "Answered lease and block requests",
            ["kind", "status"],
            registry=registry,
        )
        self.malformed = Counter(
            "penstock_memoryd_malformed_messages",
            "Messages that were no valid request",
            registry=registry,
        )
        self.served_bytes = Counter(
            "penstock_memoryd_served_bytes",
            "Bytes of blocks sent to clients",
            ["array"],
            registry=registry,
        )
        self.waiting = Gauge(
            "penstock_memoryd_waiting_requests",
            "Block requests held back until the array is complete",
            registry=registry,
        )
        self.leases = Gauge(
            "penstock_memoryd_leases", "Living processes that hold a lease", registry=registry
        )
        self.job_seconds = Counter(
            "penstock_memoryd_job_seconds", "Seconds spent", ["job"], registry=registry
        )
        self.saved_bytes = Counter(
            "penstock_memoryd_saved_bytes", "Bytes of saved state written", registry=registry
        )
        self._segment_bytes = Gauge(
            "penstock_memoryd_segment_bytes",
            "Size of shared-memory segments",
            ["segment"],
            registry=registry,
        )
        self._huge_bytes = Gauge(
            "penstock_memoryd_huge_page_bytes",
            "What of shared-memory segments lay in huge pages when they were mapped",
            ["segment"],
            registry=registry,
        )
        self._committed = Gauge(
            "penstock_memoryd_committed_version", "Committed version in memory", registry=registry
        )
        self._holds_model = Gauge(
            "penstock_memoryd_holds_model",
            "1 while there is a model in the memory, else 0",
            registry=registry,
        )

    def watch(self, memory: NodeMemory) -> None:
        """Report the memory's sizes, and its versions at every scrape."""
        for name, size in memory.spec.sizes().items():
            self._segment_bytes.labels(name.rpartition("-")[2]).set(size)
        for kind, size in memory.huge_bytes().items():
            self._huge_bytes.labels(kind).set(size)
        self._committed.set_function(lambda: float(memory.control.committed))
        self._holds_model.set_function(lambda: float(memory.control.incarnation != 0))
