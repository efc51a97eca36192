"""Serves expositions over HTTP: plain on loopback, over TLS with a password if there are keys.

The server of ``prometheus_client`` has no passwords. It also performs handshakes on the accepting
thread, where one silent client would block all others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.protocol.security.addresses import check_addresses
from penstock.protocol.security.folders import KeyFolder, read_private

USER = "penstock"
MAX_CONNECTIONS = 16
"""At a time; more are closed at once."""
_LOOK_S = 0.2
"""Seconds until :meth:`Exporter.close` is noticed."""
PATIENCE_S = 5.0
"""Seconds that a client may be silent."""

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_log = logging.getLogger(__name__)


def keys_of_metrics(config: Config, node: str) -> Path | None:
    """Returns the folder of keys with which ``node`` serves; None: in plain text.

    Raises:
        ConfigError: it must not serve where it is to.
    """
    check_addresses(config)
    if not config.cluster.uses_keys or config.cluster.keys is None:
        return None
    return config.cluster.keys / f"node.{node}"


class Exporter:
    """An application on ``port``, served by threads of its own until :meth:`close`."""

    def __init__(
        self, app: App, host: str, port: int, keys: Path | None, public: Collection[str] = ()
    ) -> None:
        """Serves ``app``. ``keys``: a node's folder of keys; with it, over TLS to clients with the
        password. ``public``: paths without a password.

        Raises:
            OSError: it cannot listen there.
            ConfigError: the keys cannot be used.
        """
        shield = None if keys is None else _Shield(keys)
        self._server = _Server(host, port, shield)
        if keys is not None:
            app = _with_password(app, keys / "metrics.sha256", public)
        self._server.set_app(app)
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Shield:
    """TLS with the keys that are in a node's folder now."""

    def __init__(self, keys: Path) -> None:
        self._folder = KeyFolder(keys, ("server.pem", "server.key"))
        self._shown = self._folder.load()
        self._context = self._made()

    def over(self, connection: socket.socket) -> ssl.SSLSocket:
        """Returns a connection that shakes hands when it is first read."""
        reloaded = self._folder.reload(_log.warning)
        if reloaded is not None and reloaded is not self._shown:
            try:
                self._context, self._shown = self._made(), reloaded
            except OSError as error:  # half replaced: the next connection tries again
                _log.warning("metrics keep their old certificate: %s", error)
        return self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder.path / "server.pem", self._folder.path / "server.key")
        return context


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread a connection, for few connections."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, shield: _Shield | None) -> None:
        self._shield = shield
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        [entry, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self.address_family = entry[0]
        super().__init__(entry[4][:2], _Handler)  # type: ignore[arg-type]  # host and port

    def server_bind(self) -> None:
        """Binds. The base class would also ask DNS for the host's name, which may block."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers on a thread, if fewer than the maximum are running."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and frees the thread's place."""
        try:
            request.settimeout(PATIENCE_S)
            shown = request if self._shield is None else self._shield.over(request)
            super().process_request_thread(shown, client_address)
        except OSError as error:
            _log.debug("metrics: a connection broke: %r", error)
            self.shutdown_request(request)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect early."""
        _log.debug("metrics: a request broke", exc_info=True)


def _with_password(app: App, path: Path, public: Collection[str]) -> App:
    """Returns ``app`` with a password. ``path``: file with the password's SHA-256. The paths in
    ``public`` need no password. A password of 256 random bits cannot be guessed from the digest, so
    it needs no slow hash.
    """

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        known = _knows(environ.get("HTTP_AUTHORIZATION", ""), path)
        if known or environ.get("PATH_INFO", "") in public:
            return app(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="penstock"')])
        return [b""]

    return guarded


def _knows(header: str, path: Path) -> bool:
    kind, _, word = header.partition(" ")
    try:
        user, _, password = base64.b64decode(word, validate=True).partition(b":")
        expected = read_private(path).decode("ascii", errors="replace").strip()
    except (binascii.Error, ValueError):
        return False
    except ConfigError as error:
        _log.warning("metrics are not served: %s", error)
        return False
    given = hashlib.sha256(password).hexdigest()
    return (
        kind.lower() == "basic"
        and user == USER.encode()
        and hmac.compare_digest(given.encode(), expected.encode())
    )
