"""Counts a mirrord's metrics; :mod:`penstock.protocol.metrics.memory` describes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.protocol.metrics.memory import MIRROR
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.shm.memory import NodeMemory


class MirrorMetrics:
    """The page of one mirrord."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._page = MetricRegistry(MIRROR, registry)

    def watch(self, replica: NodeMemory) -> None:
        """Reports the replica's size, and its version at every scrape."""
        self._page.set("penstock_replica_bytes", sum(replica.spec.sizes().values()))
        control = replica.control
        self._page.ask("penstock_replica_step", lambda: float(control.committed))

    def mirrored(self, blocks_missing: int) -> None:
        """Notes that an attempt's gradients have arrived."""
        self._page.set("penstock_replica_blocks_missing", blocks_missing)

    def pulled(self, num_bytes: int) -> None:
        """Counts pulled gradients."""
        self._page.add("penstock_replica_read_bytes", num_bytes, "gradients")

    def seeded(self, num_bytes: int) -> None:
        """Counts a block's state read from the owner."""
        self._page.add("penstock_replica_read_bytes", num_bytes, "state")

    def answered(self, kind: str, status: str) -> None:
        """Ignores an answered request: only returning nodes send any; their bytes are counted."""

    def malformed(self) -> None:
        """Counts an invalid message."""
        self._page.add("penstock_replica_malformed_messages", 1)

    def served(self, num_bytes: int) -> None:
        """Counts bytes of the replica sent to a node that lost its memory."""
        self._page.add("penstock_replica_served_bytes", num_bytes)

    def waiting(self, count: int) -> None:
        """Ignores the number of waiting requests; see :meth:`answered`."""

    def leases(self, count: int) -> None:
        """Ignores the number of leases: only mirrord maps a replica."""

    def settled(self, seconds: float) -> None:
        """Counts a settled block."""
        self._page.add("penstock_replica_settle_seconds", seconds)
