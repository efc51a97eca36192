"""A filter of the peers of a local ZeroMQ socket: only processes of the same node may talk to the
socket.

The kernel keeps other users away
(:func:`~penstock.protocol.wire.connection_limiter.allow_own_user_only`). Other processes of this
user are rejected, too. libzmq keeps frames of a message without a last frame, with 32 bytes of
memory for a byte. So the filter asks the kernel for the process at the other end of each new
connection, and cuts connections of foreign processes. Frames that arrive before the filter's thread
wakes are not bounded.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.host import world
from penstock.host.logs import Complaints
from penstock.host.process_identity import descends_from
from penstock.protocol.run.process import parent_to_die_with
from penstock.protocol.security.token import peer_process

_LOOK_S = 1.0
"""Seconds between checks of the end, if no event arrives."""

_log = logging.getLogger(__name__)


class LocalPeerFilter:
    """Cuts foreign connections to one bound local socket, on a separate thread.

    A local peer is this process's parent, or descends from it. A node has started all of its
    processes, and processes of another node must not use a local socket.
    """

    def __init__(self, socket: zmq.Socket[Any], *, elder: int) -> None:
        """Starts to watch. ``elder``: the process that started this one and all local peers."""
        self._address = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._elder = elder
        self._socket = socket
        self._complaints = Complaints(_log)
        self._closing = world.event()
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED
        self._monitor: zmq.Socket[Any] = socket.get_monitor_socket(events)
        self._thread = world.thread(target=self._run, name="local-peer-filter", daemon=True)
        self._thread.start()

    @classmethod
    def where_possible(cls, socket: zmq.Socket[Any]) -> LocalPeerFilter | None:
        """Returns a filter for a socket of this process; None if no node has started the process,
        and in a world with simulated sockets.
        """
        node = parent_to_die_with() if world.here().guards_sockets else None
        return None if node is None else cls(socket, elder=node)

    def close(self) -> None:
        """Stops watching. Called before the socket is closed; the socket's thread may be
        receiving.
        """
        self._closing.set()
        # Disable the monitor first: the thread waits for events, and the last event reports their
        # end.
        self._socket.disable_monitor()
        self._thread.join()
        self._monitor.close(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._monitor.poll(round(_LOOK_S * 1000)):
                event: Any = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._accepted(event["value"])

    def _accepted(self, descriptor: int) -> None:
        try:
            connection = sockets.socket(fileno=os.dup(descriptor))
        except OSError:
            return  # it has gone already
        with connection:
            # Gone, and the descriptor is another's?
            if connection.family != sockets.AF_UNIX or _endpoint_of(connection) != self._address:
                return
            pid, _ = peer_process(connection)
            if not descends_from(pid, self._elder):
                self._complaints.say(
                    f"{self._address}: cut the connection of process {pid}, which is none of its"
                    " node"
                )
                _cut(connection)


def _endpoint_of(connection: sockets.socket) -> str:
    """Returns the address at which a connection was accepted, as ZeroMQ writes it."""
    try:
        name = connection.getsockname()
    except OSError:
        return ""
    # The names of abstract sockets are bytes that begin with a zero.
    return f"ipc://@{name[1:].decode()}" if isinstance(name, bytes) else f"ipc://{name}"


def _cut(connection: sockets.socket) -> None:
    """Cuts a connection; libzmq sees it end, and drops its frames."""
    try:
        connection.shutdown(sockets.SHUT_RDWR)
    except OSError:
        _log.debug("a foreign peer had closed already")
