"""What all processes' Prometheus metrics have in common: the endpoint, whose they are, and gauges
that say nothing before there is something to say.

Whose they are is said once a process, by ``penstock_process_info``, not by labels on every metric:
queries join it over ``instance``, as Prometheus' guidelines have it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, Info, start_http_server

from penstock.protocol.config.schema import Config
from penstock.protocol.errors import ConfigError, reason
from penstock.protocol.run.logs import DroppedLines
from penstock.protocol.run.names import metrics_port, place_of_member
from penstock.protocol.run.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running Prometheus endpoint on ``port``."""

    port: int
    close: Callable[[], None]


def serve_metrics(registry: CollectorRegistry, run: RunDirectory, member: str) -> MetricsServer:
    """Serves the metrics of a process of ``run`` over HTTP where ``observability`` says.

    What every process has is added: ``penstock_process_info``, and log lines that were dropped.

    Raises:
        ConfigError: it cannot listen there; the message names the key.
    """
    node, device = place_of_member(run.config, member)
    registry.register(DroppedLines())
    info = Info("penstock_process", "The process that these metrics are of.", registry=registry)
    info.info(
        {
            "run": run.config.run.name,
            "run_id": run.run_id,
            "process": member,
            "node": node,
            "device": "" if device is None else str(device),
        }
    )
    return listen(registry, run.config, metrics_port(run.config, member))


def listen(registry: CollectorRegistry, config: Config, port: int) -> MetricsServer:
    """Serves ``registry`` on a port of ``observability.metrics_host``; 0 lets the system choose.

    Raises:
        ConfigError: it cannot listen there; the message names the key.
    """
    host = config.observability.metrics_host
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        key = f"metrics_host = {host!r}" if elsewhere else f"metrics_port = {port}"
        raise ConfigError(
            f"observability.{key}: cannot listen on {host}:{port}: {reason(error)}"
        ) from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)

    return MetricsServer(port=server.server_port, close=close)


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
