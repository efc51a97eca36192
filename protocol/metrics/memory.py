"""Metrics of memoryd (a node's shared memory and its clients), mirrord (a replica of another node's
state) and fetchd (one-sided reads of other nodes' memory).
"""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter, gauge

SEGMENTS = ("control", "weights", "state", "grads", "frozen")
MEMORY: tuple[Metric, ...] = (
    gauge(
        "penstock_shm_segment_bytes",
        "Size of the node's shared-memory segments.",
        {"segment": SEGMENTS},
    ),
    gauge(
        "penstock_shm_huge_page_bytes",
        "What of a segment lay in huge pages when it was mapped.",
        {"segment": SEGMENTS},
    ),
    gauge(
        "penstock_shm_base_bytes",
        "Size of the bases in /dev/shm with the node's frozen weights. All runs of a user with the"
        " same weights count the same files.",
    ),
    gauge("penstock_committed_step", "Step of the committed weights in this node's memory."),
    gauge("penstock_memoryd_holds_model", "1 while there is a model in the memory, else 0."),
    counter(
        "penstock_memoryd_requests",
        "Answered requests for leases, for where fetchd is (agent), and for arrays of blocks.",
        {
            "kind": ("lease", "agent", "weights", "frozen", "grads", "state", "words"),
            "status": ("ok", "wait", "error"),
        },
        sparse=True,
    ),
    counter("penstock_memoryd_malformed_messages", "Messages that were no valid request."),
    counter("penstock_memoryd_served_bytes", "Bytes of blocks sent to clients."),
    gauge(
        "penstock_memoryd_waiting_requests", "Block requests held back until the array is complete."
    ),
    gauge("penstock_memoryd_leases", "Living processes that hold a lease on the memory."),
    counter(
        "penstock_memoryd_job_seconds",
        "Spent on jobs: filling the memory, and writing it to disk.",
        {"job": ("restore", "save", "copy")},
    ),
)
"""All of memoryd's."""


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


READS = counter(
    "penstock_fetchd_reads",
    "Ranges that were asked for: read, not complete yet, written meanwhile, no way there.",
    {"status": ("ok", "wait", "torn", "away")},
)
READ_BYTES = counter("penstock_fetchd_read_bytes", "Bytes read out of other nodes' memory.")
FETCH: tuple[Metric, ...] = (READS, READ_BYTES)
"""All of fetchd's."""
