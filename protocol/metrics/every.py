"""Metrics that every process measures of itself."""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter

LOG_DROPPED = counter(
    "penstock_log_dropped", "Log lines that could not be written, mostly for a full disk."
)
METRICS_CPU = counter(
    "penstock_metrics_cpu_seconds",
    "CPU time of the thread that hands out this process's metrics: what being watched costs it. Of"
    " metricsd, which does nothing else, see penstock_process_cpu_seconds_total.",
)
EVERY: tuple[Metric, ...] = (LOG_DROPPED, METRICS_CPU)
"""Metrics in the registries of all processes."""
