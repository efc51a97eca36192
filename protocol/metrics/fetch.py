"""Counters of fetchd: one-sided reads of other nodes' memory."""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter

READS = counter(
    "penstock_fetchd_reads",
    "Ranges that were asked for: read, not complete yet, written meanwhile, no way there.",
    {"status": ("ok", "wait", "torn", "away")},
)
READ_BYTES = counter("penstock_fetchd_read_bytes", "Bytes read out of other nodes' memory.")
FETCH: tuple[Metric, ...] = (READS, READ_BYTES)
"""All of fetchd's."""
