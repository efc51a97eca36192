"""What all processes' Prometheus metrics have in common: the endpoint, whose they are, and gauges
that say nothing before there is something to say.

Whose they are is said once a process, by ``penstock_process_info``, not by labels on every metric:
queries join it over ``instance``, as Prometheus' guidelines have it.
"""

from __future__ import annotations

import errno
import socket

from prometheus_client import CollectorRegistry, Gauge, Info

from penstock.protocol.config.schema import Config
from penstock.protocol.errors import ConfigError, reason
from penstock.protocol.run.logs import DroppedLines
from penstock.protocol.run.names import metrics_port, place_of_member
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.access import keys_of
from penstock.protocol.security.addresses import check_addresses
from penstock.protocol.security.exporter import Exporter
from penstock.protocol.security.folders import KeyFolder


def serve_metrics(registry: CollectorRegistry, run: RunDirectory, member: str) -> Exporter:
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
    return listen(registry, run.config, metrics_port(run.config, member), node)


def listen(registry: CollectorRegistry, config: Config, port: int, node: str) -> Exporter:
    """Serves ``registry`` on a port of ``observability.metrics_host``; 0 lets the system choose.
    With ``cluster.security: tls``, with the keys of ``node``, and says when they expire.

    Raises:
        ConfigError: it cannot listen there, or must not; the message names the key.
    """
    check_addresses(config)
    host, keys = config.observability.metrics_host, None
    if config.cluster.security == "tls":
        keys = keys_of(config) / f"node.{node}"
        _say_expiry(registry, KeyFolder(keys))
    try:
        return Exporter(registry, host, port, keys)
    except OSError as error:
        port_taken = error.errno == errno.EADDRINUSE
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        key = f"metrics_host = {host!r}" if elsewhere else f"metrics_port = {port}"
        remedy = (
            "; another run on this machine may have it: choose another first port for this one, or"
            " 0, with which each process finds a free one"
        )
        raise ConfigError(
            f"observability.{key}: cannot listen on {host}:{port}: {reason(error)}"
            f"{remedy if port_taken else ''}"
        ) from error


def _say_expiry(registry: CollectorRegistry, folder: KeyFolder) -> None:
    """Adds when the keys that are there expire; 0 when they cannot be read."""

    def expires_s() -> float:
        try:
            return folder.peek().expires.timestamp()
        except ConfigError:
            return 0.0

    Gauge(
        "penstock_keys_expire_timestamp_seconds",
        "When the certificate of this node expires, in seconds since 1970.",
        registry=registry,
    ).set_function(expires_s)


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
