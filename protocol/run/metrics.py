"""What all processes' Prometheus metrics have in common: who serves them.

A process keeps a registry, and hands its page to metricsd of its node (``daemons/metrics/``), which
says of every sample whose it is.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from penstock.protocol.run.logs import DroppedLines
from penstock.protocol.run.pages import PageServer, page_address
from penstock.protocol.run.rundir import RunDirectory


def serve_metrics(registry: CollectorRegistry, run: RunDirectory, member: str) -> PageServer:
    """Hands the metrics of a process of ``run`` to metricsd whenever that asks.

    What every process has is added: log lines that were dropped.
    """
    registry.register(DroppedLines())
    return PageServer(registry, page_address(run.run_id, member))
