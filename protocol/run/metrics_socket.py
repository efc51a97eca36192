"""The abstract Unix socket through which a process sends its metrics to metricsd of its node.

Every connection receives the page without a request::

    8 bytes   length of the page, big-endian
    n bytes   the page, in Prometheus' text format

The answering thread does nothing else, so that no scrape waits for the process's work or delays it.
The kernel gives the name to one process and frees it at its death. Both ends reject processes of
other users. A client that does not read is dropped after :data:`PATIENCE_S`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from penstock.host.logs import Complaints, dropped_lines
from penstock.protocol.metrics.node import LOG_DROPPED, METRICS_CPU
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.token import peer_process, user_name

LENGTH_BYTES = 8
PATIENCE_S = 1.0
"""Seconds that a client may take to read bytes beyond the socket's buffer."""
RETRY_S = 0.5
"""A name that is taken is tried again: a process that was replaced may be dying still."""
BACKLOG = 4
"""Connections that wait. What stands still has them full soon, and is then refused at once."""

_log = logging.getLogger(__name__)


def metrics_address(run_id: str, member: str) -> str:
    """Returns the name of the abstract socket where a process of a run hands out its page."""
    return f"\0penstock/{run_id}/{member}/metrics"


def is_own_user(user: int) -> bool:
    """Returns whether a process of ``user`` may see, or say, what this one measures."""
    return user in (0, os.geteuid())


def render(registry: CollectorRegistry) -> bytes:
    """Returns the page of a registry, in Prometheus' text format."""
    # When a counter began says nothing that its resets do not, and would double the page.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # of the library
    return generate_latest(registry)


class MetricsServer:
    """Hands out the page of ``registry`` at ``address`` until :meth:`close`."""

    def __init__(self, registry: CollectorRegistry, address: str) -> None:
        self._registry, self._address = registry, address
        self._complaints = Complaints(_log)
        self._closing = threading.Event()
        self._listener = self._bound()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the answers."""
        self._closing.set()
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout=2 * PATIENCE_S)

    def _bound(self) -> socket.socket | None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        listener.listen(BACKLOG)
        return listener

    def _run(self) -> None:
        while self._listener is None and not self._closing.wait(RETRY_S):
            self._listener = self._bound()
            if self._listener is None:
                name = f"@{self._address[1:]}"
                self._complaints.say(f"{name}: {_owner(self._address)} has that name; waiting")
        if self._listener is None:
            return
        with self._listener:
            # If bound while it was being closed, no event wakes it: it must check itself.
            while not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # closed, the client is gone, or no descriptor is free
                    self._closing.wait(RETRY_S)
                    continue
                with connection:
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            pid, user = peer_process(connection)
            if not is_own_user(user):
                self._complaints.say(f"process {pid} of user {user} asked for metrics: refused")
                return
            page = render(self._registry)
            connection.settimeout(PATIENCE_S)
            connection.sendall(len(page).to_bytes(LENGTH_BYTES, "big") + page)
        except OSError as error:
            _log.debug("metrics: a client is gone: %r", error)
        except Exception:  # a collector's mistake must not end the thread
            _log.exception("the page of metrics cannot be made")


def _owner(address: str) -> str:
    """Returns which process listens at the name that is taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            pid, user = peer_process(probe)
        except OSError:
            return "another process"
    return f"process {pid} of {user_name(user)}"


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
