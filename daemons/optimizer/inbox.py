"""Queues all input of optimizerd: one queue, filled by the listening threads.

Both listening threads end within :data:`POLL_S` of a request to end.
"""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from penstock.daemons.kit.events import EffectFailed
from penstock.daemons.optimizer.effects import FinishedSweep
from penstock.daemons.optimizer.machine.events import Pulled
from penstock.daemons.optimizer.metrics import OptimizerMetrics
from penstock.host import world
from penstock.host.errors import ConfigError, ProtocolError, StateError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.wire.addresses import HomeSocket
from penstock.protocol.wire.connection_limiter import (
    Bounds,
    ConnectionLimiter,
    allow_own_user_only,
    set_handshake_timeout,
)
from penstock.protocol.wire.frames import BlockUpdated, GradientReady, decode
from penstock.protocol.wire.local_names import LocalName
from penstock.protocol.wire.local_peers import LocalPeerFilter
from penstock.protocol.wire.member import MemberLink
from penstock.protocol.wire.sockets import OPEN, SocketAccess, ZapAuthenticator

POLL_S = 0.2
RECEIVE_HIGH_WATER = 1024
MAX_MESSAGE_BYTES = 4096
MAX_UNREAD = 1 << 16
BOUNDS = Bounds(connections=1024, connection_bytes=2**19, total_bytes=2**23, silent_bytes=2**18)
"""Limits for connections from other nodes. Their workers send messages of some hundred bytes, and
are never silent for long.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """A listening thread has ended: ``error`` says why."""

    error: Exception


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """A pull has ended."""

    event: Pulled | EffectFailed
    num_bytes: int


Item = pb.SchedulerMessage | GradientReady | BlockUpdated | FinishedSweep | PullOutcome | Lost
Inbox = queue.SimpleQueue[Item]


class Takes(Protocol):
    """An inbox that takes what comes from the scheduler."""

    def put(self, item: pb.SchedulerMessage | Lost) -> None:
        """Adds an item."""


class LinkReader:
    """Moves the scheduler's messages into the inbox."""

    def __init__(self, link: MemberLink, inbox: Takes) -> None:
        self._link = link
        self._inbox = inbox
        self._closing = world.event()
        self._thread = world.thread(target=self._run, name="link-reader")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                message = self._link.receive(POLL_S)
                if message is not None:
                    self._inbox.put(message)
        except ProtocolError as error:
            self._inbox.put(Lost(error))


class GradientSocket:
    """The PULL sockets on which workers say that gradients are complete, or a block is updated.

    The local one is for the node's own workers. In a cluster of several nodes there is one on TCP
    too (:attr:`endpoint`), for workers that compute a contribution of a block of this node.
    Anybody may connect: what is neither :class:`GradientReady` nor :class:`BlockUpdated` is dropped
    and counted.
    """

    def __init__(
        self,
        *,
        local_address: str,
        host: str | None,
        inbox: Inbox,
        metrics: OptimizerMetrics,
        access: SocketAccess = OPEN,
    ) -> None:
        """Binds the sockets. The local address is a lock, because only one process at a time can
        bind it. ``access``: the clients that may connect over TCP.

        Raises:
            StateError: another optimizerd of this run and node is alive.
            ConfigError: ``host`` is no address of this machine.
        """
        self._inbox = inbox
        self._metrics = metrics
        self._closing = world.event()
        self._context: zmq.Context[Any] = world.sockets()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._home: HomeSocket | None = None
        self._limiter: ConnectionLimiter | None = None
        self._peer_filter: LocalPeerFilter | None = None
        self._name: LocalName | None = None
        self._access = access
        self._authenticator = ZapAuthenticator(self._context, access)
        try:
            self._bind_local(local_address)
            if host is not None:
                self._bind_tcp(host)
        except BaseException:
            self._leave()
            raise
        self._peer_filter = LocalPeerFilter.where_possible(self._sockets[0])
        self._thread = world.thread(target=self._run, name="gradients")

    @property
    def endpoint(self) -> str:
        """The address for workers of other nodes; empty if there are no other nodes."""
        return "" if self._home is None else self._home.endpoint

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes the sockets; further calls do nothing."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        for watch in (self._limiter, self._peer_filter):
            if watch is not None:
                watch.close()
        self._limiter = self._peer_filter = None
        self._leave()

    def _leave(self) -> None:
        self._authenticator.close()
        self._context.destroy(linger=0)
        if self._name is not None:
            self._name.release()

    def _bind_local(self, address: str) -> None:
        socket = self._socket()
        allow_own_user_only(socket)
        try:
            self._name = LocalName.take(address, "optimizerd")
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            raise StateError(
                f"another optimizerd of this run is alive: it listens on {address}"
            ) from error

    def _bind_tcp(self, host: str) -> None:
        socket = self._socket()
        set_handshake_timeout(socket)
        self._access.protect(socket)
        try:
            self._home = HomeSocket(socket, host, self._access.announce)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(
                f"cluster.nodes host {host!r}: optimizerd cannot listen there: {error}"
            ) from error
        self._limiter = ConnectionLimiter.where_possible(
            socket, BOUNDS, pre_auth_reply_bytes=self._access.pre_auth_reply_bytes
        )

    def _socket(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        self._sockets.append(socket)
        return socket

    def _run(self) -> None:
        poller = world.poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while not self._closing.is_set():
            if self._home is not None:
                self._home.follow()
            for ready, _ in poller.poll(round(POLL_S * 1000)):
                frames = ready.recv_multipart(copy=False)
                if self._limiter is not None and ready is not self._sockets[0]:
                    self._limiter.heard(frames[0])
                self._take([frame.bytes for frame in frames])

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"expected one frame, got {len(frames)}")
            message = decode(frames[0], GradientReady, BlockUpdated)
            assert isinstance(message, GradientReady | BlockUpdated)
            if self._inbox.qsize() >= MAX_UNREAD:
                # Gradients are found by their ready words, too.
                raise ProtocolError(f"{MAX_UNREAD} messages are unread")
            self._inbox.put(message)
        except ProtocolError as error:
            self._metrics.dropped("malformed")
            _log.debug("dropped a message: %s", error)
