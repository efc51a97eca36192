"""What all processes' Prometheus metrics have in common: who serves them, and gauges that say
nothing before there is something to say.

A process keeps a registry, and hands its page to metricsd of its node (``daemons/metrics/``), which
says of every sample whose it is.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from penstock.protocol.run.logs import DroppedLines
from penstock.protocol.run.pages import PageServer, page_address
from penstock.protocol.run.rundir import RunDirectory


def serve_metrics(registry: CollectorRegistry, run: RunDirectory, member: str) -> PageServer:
    """Hands the metrics of a process of ``run`` to metricsd whenever that asks.

    What every process has is added: log lines that were dropped.
    """
    registry.register(DroppedLines())
    return PageServer(registry, page_address(run.run_id, member))


class LateGauge:
    """A gauge that is absent until its first value: 0 would be taken for a measurement."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text, self._registry = name, text, registry
        self._gauge: Gauge | None = None

    def set(self, value: float) -> None:
        """Sets the value; from now on the gauge is there."""
        if self._gauge is None:
            self._gauge = Gauge(self._name, self._text, registry=self._registry)
        self._gauge.set(value)
