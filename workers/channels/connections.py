"""Outgoing connections of an epoch, and the thread that notices a lost one.

A PUSH socket with a broken connection reconnects silently: messages on their way are gone, and a
receiver would wait for them. So a thread reads libzmq's events of each connection. The kernel ends
a connection over TCP if its peer stops to acknowledge (``TCP_USER_TIMEOUT``; keepalive probes while
no bytes are in flight). A lost connection is reported once, and no message is sent again. The
scheduler begins another epoch, which repeats the attempt with the same bits.

A local connection usually ends because its process ends. The node then tells the scheduler the
reason, and the scheduler ends the epoch. A loss between two live processes is reported a little
later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.host import world
from penstock.protocol.wire.sockets import OPEN, Connection, SocketAccess

QUEUED_MESSAGES = 4096
"""High-water mark per peer; plans stay far below it."""
CONNECT_S = 2.0
"""Seconds before the next attempt to connect: the kernel's own pauses between attempts
grow.
"""
RETRY_S = 0.1
LOOK_S = 0.1
SHORTEST_S = 1.0
"""Seconds of an epoch before any loss is reported, so that epochs do not follow each other too
fast.
"""
LOCAL_S = 2.0
"""Seconds from the loss of a local connection to the report."""

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

Lost = Callable[[str], None]
"""Called once, on the listening thread, with the event and the peer of a lost connection."""


@dataclass(slots=True)
class _Watched:
    """A connection; libzmq reports its events on a monitor."""

    peer: str
    address: str
    connection: Connection
    connected: bool = False

    @property
    def grace_s(self) -> float:
        """Seconds from a loss to its report."""
        return 0.0 if self.address.startswith("tcp:") else LOCAL_S


class Connections:
    """PUSH sockets to peers, from :meth:`open` to :meth:`close`. The caller serializes calls."""

    def __init__(
        self,
        context: zmq.Context[Any],
        timeout_s: float,
        lost: Lost | None = None,
        access: SocketAccess = OPEN,
    ) -> None:
        """Prepares connections.

        A connection is lost if its peer is unreachable, or acknowledges nothing over TCP, for
        ``timeout_s`` seconds, and when it is closed or reset. The loss of a closed connection is
        reported at once over TCP, and after :data:`LOCAL_S` seconds on this machine. Without
        ``lost`` no thread listens for losses. ``access``: the credentials for peers.
        """
        self._access = access
        self._context = context
        self._timeout_s = timeout_s
        self._lost = lost
        self._connections: list[Connection] = []
        self._watched: list[_Watched] = []
        self._closing = world.event()
        self._thread = world.thread(target=self._listen, name="connections", daemon=True)

    def open(self, peer: str, address: str) -> Connection:
        """Connects to a peer; the connection belongs to this object.

        Raises:
            ProtocolError: the address lacks a field that the access needs.
        """
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set(zmq.SNDHWM, QUEUED_MESSAGES)
        socket.set(zmq.LINGER, 0)
        watched = self._lost is not None
        if watched and address.startswith("tcp:"):
            _end_when_silent(socket, self._timeout_s)
        connection = Connection(socket, address, self._access, _EVENTS if watched else 0)
        self._connections.append(connection)
        if watched:
            self._watched.append(_Watched(peer, address, connection))
        return connection

    def watch(self) -> None:
        """Starts to listen for losses; all connections are open."""
        if self._watched:
            self._thread.start()

    def close(self) -> None:
        """Closes all sockets; unsent messages are dropped, and no loss is reported any more."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in self._connections:
            connection.close()
        self._connections, self._watched = [], []

    def _listen(self) -> None:
        poller = world.poller()
        for watched in self._watched:
            poller.register(watched.connection.monitor, zmq.POLLIN)
        waited_s, last_s, due_s, loss = 0.0, world.monotonic(), SHORTEST_S, ""
        while not self._closing.is_set():
            ready = {monitor for monitor, _ in poller.poll(round(LOOK_S * 1000))}
            for watched in self._watched:
                if watched.connection.monitor in ready:
                    # Taken also when something is lost already: an event that stays makes the next
                    # poll return at once, and this loop spin.
                    event = self._take_event(watched)
                    if event and not loss:
                        loss = event
                        due_s = max(SHORTEST_S, waited_s + watched.grace_s)
            now_s = world.monotonic()
            # A longer gap means that this process was stopped: events of that time are unread.
            waited_s, last_s = waited_s + min(now_s - last_s, 2 * LOOK_S), now_s
            if waited_s > self._timeout_s:
                loss = loss or self._unreachable()
            if loss and waited_s > due_s and self._lost is not None:
                self._lost(loss)
                return

    def _take_event(self, watched: _Watched) -> str:
        """Returns a description of the loss in an event, an empty text without a loss."""
        event: Any = recv_monitor_message(watched.connection.monitor)
        watched.connection.note(event["event"])
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            watched.connected = True
            return ""
        # A connection that never was one has carried nothing.
        return f"the connection to {watched.peer} was lost" if watched.connected else ""

    def _unreachable(self) -> str:
        for watched in self._watched:
            # A peer that rejects connections is alive; the next send to it reports the reason.
            if not watched.connected and not watched.connection.refusal():
                return (
                    f"{watched.peer} could not be reached at {watched.address} for"
                    f" {self._timeout_s:g} s"
                )
        return ""


def _end_when_silent(socket: zmq.Socket[Any], timeout_s: float) -> None:
    """Makes the kernel end a connection that the other end does not acknowledge."""
    socket.set(zmq.TCP_MAXRT, round(timeout_s * 1000))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, max(1, round(timeout_s / 4)))
    socket.set(zmq.TCP_KEEPALIVE_INTVL, max(1, round(timeout_s / 4)))
    socket.set(zmq.CONNECT_TIMEOUT, round(CONNECT_S * 1000))
    socket.set(zmq.RECONNECT_IVL, round(RETRY_S * 1000))
