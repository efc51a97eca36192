"""Metrics of mirrord: the replica of another node's state (``memory.mirror: partner``)."""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter, gauge

MIRROR: tuple[Metric, ...] = (
    gauge("penstock_replica_bytes", "Shared memory of the replica."),
    gauge(
        "penstock_replica_blocks_missing",
        "Blocks without mirrored state: if their node were lost now, the run would go"
        " back to its newest saved state.",
        absent="until an attempt was mirrored",
    ),
    gauge("penstock_replica_step", "Committed step that the replica knows of."),
    counter(
        "penstock_replica_read_bytes",
        "Read for the replica: gradients of attempts, and state of blocks that were missing.",
        {"what": ("gradients", "state")},
    ),
    counter("penstock_replica_served_bytes", "Sent to the other node, which had lost its memory."),
    counter("penstock_replica_malformed_messages", "Messages that were no valid request."),
    counter("penstock_replica_settle_seconds", "Spent on taking committed steps in."),
)
"""All of mirrord's."""
