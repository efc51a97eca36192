"""Metrics of memoryd: the shared memory of a node, and its clients."""

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
        {"job": ("restore", "save")},
    ),
)
"""All of memoryd's."""
