"""The paths that metricsd serves, and its address.

``/metrics``: all processes of the node. ``/targets``: addresses of all nodes of the run, for
Prometheus' HTTP service discovery. ``/clock``: the time here, for other nodes; it needs no
password. ``/``: a page with links for people.
"""

from __future__ import annotations

import errno
import html
import json
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.daemons.monitor.metrics.clocks import CLOCK_PATH, clock_page
from penstock.daemons.monitor.metrics.collection import DEADLINE_S, Collection
from penstock.daemons.monitor.metrics.exporter import App, Exporter, keys_of_metrics
from penstock.daemons.monitor.metrics.targets import addresses, read_targets
from penstock.host.errors import ConfigError, reason
from penstock.protocol.run.names import metrics_port, node_index
from penstock.protocol.security.token import describe_listener

PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""


class PortTakenError(ConfigError):
    """Another process has the configured port."""


_TIMEOUT_HEADER = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"


def application(collection: Collection, config: Config, run_dir: Path) -> App:
    """Returns the application that serves the pages of a node."""

    def metrics(environ: dict[str, Any]) -> tuple[str, bytes]:
        return PAGE_TYPE, collection.page(_deadline_s(environ.get(_TIMEOUT_HEADER, "")))

    def targets(environ: dict[str, Any]) -> tuple[str, bytes]:
        return "application/json", json.dumps(read_targets(run_dir)).encode()

    def front(environ: dict[str, Any]) -> tuple[str, bytes]:
        return "text/html; charset=utf-8", _front_page(config, run_dir).encode()

    pages: dict[str, Callable[[dict[str, Any]], tuple[str, bytes]]] = {
        "/metrics": metrics,
        "/targets": targets,
        CLOCK_PATH: lambda environ: ("application/json", clock_page(time.time())),
        "/": front,
    }

    def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        page = pages.get(environ.get("PATH_INFO", ""))
        if page is None:
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [f"available paths: {', '.join(pages)}\n".encode()]
        kind, body = page(environ)
        start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    return serve


def listen(app: App, config: Config, node: str, former: int = 0) -> Exporter:
    """Serves ``app`` where ``observability`` says; where any port will do, at ``former`` if that is
    free. With ``cluster.security: tls``, with the keys of ``node``.

    Raises:
        ConfigError: it cannot listen there, or must not; the message names the key.
    """
    keys = keys_of_metrics(config, node)
    host, port = config.observability.metrics_host, metrics_port(config, node_index(config, node))
    if former and not port:
        with suppress(OSError):
            return Exporter(app, host, former, keys, public=(CLOCK_PATH,))
    try:
        return Exporter(app, host, port, keys, public=(CLOCK_PATH,))
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def check_port(config: Config, node: str) -> None:
    """Refuses a configured port that something else on this machine has.

    Raises:
        ConfigError: names the key.
    """
    host, port = config.observability.metrics_host, metrics_port(config, node_index(config, node))
    if not port:
        return
    try:
        [entry, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(entry[0]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(entry[4])
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    port_taken = error.errno == errno.EADDRINUSE
    elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    key = f"metrics_host = {host!r}" if elsewhere else f"metrics_port = {port}"
    remedy = (
        "; another run on this machine may have it: choose another port for this run, or 0 to let"
        " Penstock find a free port and publish it to Prometheus (observability.targets)"
    )
    owner = f" ({describe_listener(f'{host}:{port}')})" if port_taken else ""
    return (PortTakenError if port_taken else ConfigError)(
        f"observability.{key}: cannot listen on {host}:{port}: {reason(error)}{owner}"
        f"{remedy if port_taken else ''}"
    )


def _deadline_s(timeout: str) -> float:
    """Returns the seconds that processes may take when Prometheus waits for ``timeout`` seconds,
    from its header. Half of the timeout leaves time to send the answers.
    """
    try:
        seconds = float(timeout)
    except ValueError:
        return DEADLINE_S
    return seconds / 2 if 0 < seconds < 2 * DEADLINE_S else DEADLINE_S


def _front_page(config: Config, run_dir: Path) -> str:
    nodes = "".join(
        f"<li>{html.escape(node)}: <code>{html.escape(address)}</code></li>"
        for node, address in addresses(run_dir).items()
    )
    name = html.escape(config.run.name)
    return (
        f"<!doctype html><title>penstock: {name}</title><h1>penstock: {name}</h1>"
        '<p><a href="/metrics">/metrics</a>: this node, for Prometheus.'
        ' <a href="/targets">/targets</a>: all nodes, for its HTTP service discovery.'
        f"</p><ul>{nodes}</ul>\n"
    )
