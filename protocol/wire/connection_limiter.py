"""Limits the memory that strangers can make a ZeroMQ socket hold.

``MAXMSGSIZE`` bounds a frame, and a high-water mark whole messages. Frames of a message without a
last frame count for neither: libzmq keeps them, without a limit and out of sight. So the limiter
watches the connections. The kernel counts the bytes of a connection, and the owner of the socket
reports the connection of each message. A connection with too many bytes since its last message is
cut. If all connections together have too many, the largest is cut. If there are too many
connections, the oldest without a message is cut.

The limiter checks every :data:`LOOK_S`. Bytes that arrive in between exceed the bound. libzmq needs
up to 40 bytes of memory for a byte of the wire, if frames are empty. Connections on local sockets
need no limit: :func:`allow_own_user_only` keeps other users away from them.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import resource
import socket as sockets
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.host import world
from penstock.host.logs import Complaints

LOOK_S = 0.02
HANDSHAKE_MS = 10_000
_TCP_INFO_BYTES = 256
_TCP_INFO_COUNTS = struct.Struct("<QQ")
_COUNTS_OFFSET = 120
"""Offset of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in the kernel's ``struct tcp_info``
(linux/tcp.h, since 4.1).
"""
_OTHER_DESCRIPTORS = 512
"""Descriptors that a process may need in addition to its connections."""
PRE_AUTH_BYTES = 4096
"""Most bytes of a client before it has authenticated; a handshake takes 600 bytes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """``connection_bytes``: brought by a connection since its last message; ``total_bytes``: by all
    together; ``silent_bytes``: by all together that never sent a whole message; ``connections``: at
    a time. Strangers may bring :data:`PRE_AUTH_BYTES` each.
    """

    connections: int
    connection_bytes: int
    total_bytes: int
    silent_bytes: int


@dataclass(slots=True, kw_only=True)
class _Connection:
    """A duplicate of the descriptor of a connection. ``base``: bytes that belonged to messages;
    ``silent``: without a message so far; ``unauthenticated``: before its handshake succeeded.
    """

    socket: sockets.socket
    unauthenticated: bool
    base: int = 0
    received: int = 0
    silent: bool = True

    @property
    def pending(self) -> int:
        return self.received - self.base


class ConnectionLimiter:
    """Watches the TCP connections of one bound socket, on a thread of its own."""

    def __init__(
        self,
        socket: zmq.Socket[Any],
        bounds: Bounds,
        cut: Callable[[], None] = lambda: None,
        *,
        pre_auth_reply_bytes: int | None = None,
    ) -> None:
        """Starts to watch. ``cut`` is called, on the limiter's thread, for each connection that is
        cut.

        ``pre_auth_reply_bytes``: see :class:`penstock.protocol.wire.sockets.SocketAccess`.
        """
        self.bounds = bounds
        self._pre_auth_reply_bytes = pre_auth_reply_bytes
        _allow_descriptors(bounds.connections)
        self._socket = socket
        self._cut = cut
        self._complaints = Complaints(_log)
        self._port = int(socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(events)
        self._connections: dict[int, _Connection] = {}  # oldest first
        self._heard: set[int] = set()
        self._have_cut = False
        self._closing = world.event()
        self._thread = world.thread(target=self._run, name="limiter", daemon=True)
        self._thread.start()

    @classmethod
    def where_possible(
        cls,
        socket: zmq.Socket[Any],
        bounds: Bounds,
        cut: Callable[[], None] = lambda: None,
        *,
        pre_auth_reply_bytes: int | None = None,
    ) -> ConnectionLimiter | None:
        """Returns a limiter; None in a world with sockets that are not the kernel's."""
        if not world.here().guards_sockets:
            return None
        return cls(socket, bounds, cut, pre_auth_reply_bytes=pre_auth_reply_bytes)

    def heard(self, frame: zmq.Frame) -> None:
        """Records that a message with this frame arrived; called by the thread that received it."""
        self._heard.add(int(frame.get(zmq.SRCFD)))

    def close(self) -> None:
        """Stops watching. Called before the socket is closed; the socket's thread may be
        receiving.
        """
        self._closing.set()
        self._thread.join()
        # Disable the monitor first: an event that no thread reads would block the socket's end.
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._take_events()
                self._look()
                self._clean_up()
        finally:
            for connection in self._connections.values():
                connection.socket.close()
            self._connections.clear()

    def _take_events(self) -> None:
        timeout_ms = round(LOOK_S * 1000)
        while self._monitor.poll(timeout_ms):
            event: Any = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(event["value"])
            else:
                self._forget(event["value"])
            timeout_ms = 0

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)
        try:
            duplicate = sockets.socket(fileno=os.dup(descriptor))
            address = duplicate.getsockname()
        except OSError:
            return  # it has gone already
        if duplicate.family != sockets.AF_INET or address[1] != self._port:
            duplicate.close()  # gone, and the descriptor is another's
            return
        unauthenticated = self._pre_auth_reply_bytes is not None
        self._connections[descriptor] = _Connection(
            socket=duplicate, unauthenticated=unauthenticated
        )
        if len(self._connections) > self.bounds.connections:
            silent = [d for d, c in self._connections.items() if c.silent and d not in self._heard]
            unknown = [d for d in silent if self._connections[d].unauthenticated]
            self._end(
                (*unknown, *silent, descriptor)[0],
                f"more than {self.bounds.connections} connections",
            )

    def _look(self) -> None:
        heard, self._heard = self._heard, set()
        # A message can be received before the event that its connection was accepted is read here.
        self._heard.update(heard - self._connections.keys())
        for descriptor, connection in list(self._connections.items()):
            try:
                self._count(connection)
            except OSError:
                self._forget(descriptor)
                continue
            if descriptor in heard:
                connection.base, connection.silent = connection.received, False
            if connection.unauthenticated and connection.received > PRE_AUTH_BYTES:
                self._end(descriptor, f"{connection.received} bytes without being let in")
            elif connection.pending > self.bounds.connection_bytes:
                self._end(descriptor, f"{connection.pending} bytes without a whole message")
        self._bound_together(self.bounds.total_bytes, silent=False)
        self._bound_together(self.bounds.silent_bytes, silent=True)

    def _bound_together(self, limit_bytes: int, *, silent: bool) -> None:
        """Cuts the largest connections until all, or all ``silent`` ones, are within the limit."""
        bounded = ((d, c) for d, c in self._connections.items() if c.silent or not silent)
        pending_bytes = {descriptor: c.pending for descriptor, c in bounded}
        while sum(pending_bytes.values()) > limit_bytes:
            largest = max(pending_bytes, key=pending_bytes.__getitem__)
            del pending_bytes[largest]
            self._end(largest, f"over {limit_bytes} bytes without whole messages")

    def _count(self, connection: _Connection) -> None:
        """Reads from the kernel the bytes that a connection has received and acknowledged.

        Raises:
            OSError: the connection is closed.
        """
        unread = _unread_bytes(connection.socket)
        info = connection.socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
        acknowledged, received = _TCP_INFO_COUNTS.unpack_from(info, _COUNTS_OFFSET)
        connection.received = received - unread
        if self._pre_auth_reply_bytes is not None:
            # A client that acknowledges more has received the end of a successful handshake.
            connection.unauthenticated = acknowledged <= self._pre_auth_reply_bytes

    def _end(self, descriptor: int, reason: str) -> None:
        """Cuts a connection; libzmq sees it end and drops its frames."""
        connection = self._connections[descriptor]
        try:
            host, port = connection.socket.getpeername()
            peer = f"{host}:{port}"
        except OSError:
            peer = "a closed peer"
        _abort(connection.socket)
        self._forget(descriptor)
        self._complaints.say(f"port {self._port}: cut the connection of {peer}: {reason}")
        self._cut()
        self._have_cut = True

    def _clean_up(self) -> None:
        """Frees the memory of connections that were cut."""
        if self._have_cut:
            world.sleep(LOOK_S)  # libzmq frees what it kept on a thread of its own
            _give_back_memory()
            self._have_cut = False

    def _forget(self, descriptor: int) -> None:
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            connection.socket.close()


def set_handshake_timeout(socket: zmq.Socket[Any]) -> None:
    """Bounds the time of handshakes on a socket that strangers reach; before it is bound."""
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def allow_own_user_only(socket: zmq.Socket[Any]) -> None:
    """Rejects connections of other users to a local socket; before it is bound."""
    socket.set(zmq.IPC_FILTER_UID, os.getuid())


def _allow_descriptors(num_connections: int) -> None:
    """Raises this process's soft limit of descriptors as far as allowed, so that strangers cannot
    use up the descriptors of the process. A connection takes two.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * num_connections + _OTHER_DESCRIPTORS
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


def _unread_bytes(connection: sockets.socket) -> int:
    """Returns the bytes that the kernel has received and libzmq has not read yet."""
    unread = fcntl.ioctl(connection, termios.FIONREAD, bytes(4))
    return int.from_bytes(unread, sys.byteorder)


def _abort(connection: sockets.socket) -> None:
    """Resets a connection immediately, for all processes that have it open, and drops bytes in the
    kernel.

    After a shutdown libzmq would read on while bytes arrive. To connect a TCP socket to no address
    is Linux's way to reset it (connect(2)).
    """
    nowhere = struct.pack("=H14x", sockets.AF_UNSPEC)
    _libc().connect(connection.fileno(), nowhere, len(nowhere))


def _give_back_memory() -> None:
    """Returns freed memory to the kernel; glibc's allocator would keep it."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
