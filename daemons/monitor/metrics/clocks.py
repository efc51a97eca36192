"""Measures how far this node's clock is ahead of the first node's, and the error of the
measurement.

It follows NTP (RFC 5905, section 8) with one exchange. This node reads its own clock at the start
and at the end of a request to the first node's metricsd. That process reads its clock in between.
If its reading fell into the middle, the offset is exact; the error is at most half of the duration.
Of the last exchanges the one with the smallest error now is used, because clocks drift apart with
time.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.daemons.monitor.metrics.exporter import keys_of_metrics
from penstock.daemons.monitor.metrics.exposition import Exposition
from penstock.daemons.monitor.metrics.targets import addresses
from penstock.host.files import DAMAGED, parse_json
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.identity import METRICS_HOST

CLOCK_PATH = "/clock"
EXCHANGE_S = 10.0
FIRST_EXCHANGES_S = 1.0
REMEMBERED = 12
MAX_DRIFT = 50e-6
"""Seconds a second by which two clocks move apart: quartz crystals keep within that."""
STALE_S = 300.0
TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 200

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One comparison, at ``at_s`` of the monotonic clock: this clock is ``offset_s`` ahead, give or
    take ``error_s``.
    """

    at_s: float
    offset_s: float
    error_s: float

    def error_at(self, now_s: float) -> float:
        """Returns by how much the offset may be wrong by now."""
        return self.error_s + MAX_DRIFT * (now_s - self.at_s)


def compare(url: str, context: ssl.SSLContext | None) -> Exchange:
    """Asks the metricsd at ``url`` for its time.

    Raises:
        OSError, http.client.HTTPException, ValueError: it does not answer, or with no time.
    """
    place = urlsplit(url)
    connection = _connection(place.hostname or "", place.port or 0, context)
    try:
        connection.connect()  # and shake hands: the exchange itself is to be short
        begun_s = time.time()
        connection.request("GET", CLOCK_PATH)
        answer = connection.getresponse()
        ended_s = time.time()
        text = answer.read(_MAX_ANSWER_BYTES)
    finally:
        connection.close()
    try:
        theirs_s = float(parse_json(text)["seconds"])
    except DAMAGED as error:
        raise ValueError(f"{url}: {text!r} is not a time") from error
    return Exchange(
        at_s=time.monotonic(),
        offset_s=(begun_s + ended_s) / 2 - theirs_s,
        error_s=abs(ended_s - begun_s) / 2,
    )


def clock_page(now_s: float) -> bytes:
    """Returns what others compare their clocks with: the time in seconds since 1970."""
    return json.dumps({"seconds": now_s}).encode()


class ClockWatch:
    """Compares this node's clock with that of the node ``first`` until :meth:`close`."""

    def __init__(self, run: RunDirectory, first: str, node: str) -> None:
        self._run, self._first = run, first
        self._keys = keys_of_metrics(run.config, node)
        self._exchanges: deque[Exchange] = deque(maxlen=REMEMBERED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._compare_on, name="clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the exchanges."""
        self._closing.set()
        self._thread.join(timeout=2 * TIMEOUT_S)

    def put(self, exposition: Exposition) -> None:
        """Writes the offset, if it is known."""
        best = best_of(tuple(self._exchanges), time.monotonic())
        if best is not None:
            offset_s, error_s = best
            exposition.put("penstock_clock_offset_seconds", offset_s, peer=self._first)
            exposition.put("penstock_clock_offset_error_seconds", error_s, peer=self._first)

    def _compare_on(self) -> None:
        while not self._closing.wait(EXCHANGE_S if len(self._exchanges) > 3 else FIRST_EXCHANGES_S):
            url = addresses(self._run.path).get(self._first)
            if url is None:
                continue  # not there yet, or being replaced
            try:
                context = None if self._keys is None else context_of(self._keys)
                self._exchanges.append(compare(url, context))
            except (OSError, http.client.HTTPException, ValueError) as error:
                _log.debug("the clock of %s: %s", self._first, error)


def best_of(exchanges: tuple[Exchange, ...], now_s: float) -> tuple[float, float] | None:
    """Returns the offset that is known best at ``now_s``, and its error, in seconds; None: none is
    younger than :data:`STALE_S`.
    """
    young = [exchange for exchange in exchanges if now_s - exchange.at_s < STALE_S]
    best = min(young, key=lambda exchange: exchange.error_at(now_s), default=None)
    return None if best is None else (best.offset_s, best.error_at(now_s))


def _connection(host: str, port: int, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    if context is None:
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    return _NamedConnection(host, port, context)


class _NamedConnection(http.client.HTTPConnection):
    """A TLS connection to any address with a certificate for :data:`METRICS_HOST`."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=TIMEOUT_S)
        self._context = context

    def connect(self) -> None:
        """Connects, with the TLS handshake."""
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=METRICS_HOST)


def context_of(keys: Path) -> ssl.SSLContext:
    """Returns a context that trusts the run's certificates. ``keys``: a node's folder of keys."""
    return ssl.create_default_context(cafile=str(keys / "ca.pem"))
