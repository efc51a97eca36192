"""What a mirrord counts; names and meanings are in :mod:`penstock.protocol.metrics.memory`."""

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
        """Report the replica's size, and its version at every scrape."""
        self._page.set("penstock_replica_bytes", sum(replica.spec.sizes().values()))
        control = replica.control
        self._page.ask("penstock_replica_step", lambda: float(control.committed))

    def mirrored(self, blocks_missing: int) -> None:
        """An attempt's gradients are here."""
        self._page.set("penstock_replica_blocks_missing", blocks_missing)

    def pulled(self, num_bytes: int) -> None:
        """Gradients of an attempt came."""
        self._page.add("penstock_replica_read_bytes", num_bytes, "gradients")

    def seeded(self, num_bytes: int) -> None:
        """A block's state came."""
        self._page.add("penstock_replica_read_bytes", num_bytes, "state")

    def answered(self, kind: str, status: str) -> None:
        """A request was answered: only nodes that come back ask, so bytes say enough."""

    def malformed(self) -> None:
        """A message was no valid request."""
        self._page.add("penstock_replica_malformed_messages", 1)

    def served(self, num_bytes: int) -> None:
        """Bytes of the replica were sent to a node that lost its memory."""
        self._page.add("penstock_replica_served_bytes", num_bytes)

    def waiting(self, count: int) -> None:
        """So many requests are held back; see :meth:`answered`."""

    def leases(self, count: int) -> None:
        """Nobody maps a replica but its mirrord."""

    def settled(self, seconds: float) -> None:
        """A block took a committed step in."""
        self._page.add("penstock_replica_settle_seconds", seconds)
