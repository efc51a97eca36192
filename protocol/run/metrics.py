"""Prometheus metrics that all processes share, and the process that serves them.

A process keeps a registry, and sends its page to metricsd of its node
(``daemons/monitor/metrics/``), which labels every sample with the process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from penstock.host.logs import dropped_lines
from penstock.protocol.metrics.every import LOG_DROPPED, METRICS_CPU
from penstock.protocol.run.metrics_socket import MetricsServer, metrics_address
from penstock.protocol.run.rundir import RunDirectory


def serve_metrics(registry: CollectorRegistry, run: RunDirectory, member: str) -> MetricsServer:
    """Hands the metrics of a process of ``run`` to metricsd whenever that asks.

    What every process has is added: log lines that were dropped, and what this costs.
    """
    registry.register(DroppedLines())
    registry.register(RenderTime())
    return MetricsServer(registry, metrics_address(run.run_id, member))


class DroppedLines(Collector):
    """Counts the lines that the log files of this process dropped."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the count; called at every scrape."""
        yield CounterMetricFamily(LOG_DROPPED.name, LOG_DROPPED.text, value=dropped_lines())


class RenderTime(Collector):
    """Counts the CPU time of the thread that asks; a page server has a thread for nothing else."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Reads the counters at each scrape."""
        yield CounterMetricFamily(METRICS_CPU.name, METRICS_CPU.text, value=time.thread_time())
