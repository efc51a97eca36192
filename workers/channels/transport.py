"""Messages between workers, and from workers to optimizerds, over ZeroMQ.

One PULL socket per worker lives as long as the process. A communication thread moves its messages
into the :class:`~penstock.workers.channels.inbox.Inbox`, and those about process groups into
:class:`~penstock.workers.channels.inbox.Notices`. PUSH sockets, one per peer, are made at each
Begin; each Drain closes them and drops unsent messages. :mod:`.connections` notices a lost
connection in between. Malformed messages are dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from penstock.host import world
from penstock.host.errors import LostMemberError, ProtocolError
from penstock.protocol.wire.addresses import HomeSocket
from penstock.protocol.wire.connection_limiter import (
    Bounds,
    ConnectionLimiter,
    allow_own_user_only,
    set_handshake_timeout,
)
from penstock.protocol.wire.frames import (
    BlockUpdated,
    GradientReady,
    GroupAddress,
    Transfer,
    TransferShape,
    decode,
    encode,
)
from penstock.protocol.wire.local_names import LocalName
from penstock.protocol.wire.local_peers import LocalPeerFilter
from penstock.protocol.wire.sockets import OPEN, Connection, SocketAccess, ZapAuthenticator
from penstock.workers.channels.connections import Connections, Lost
from penstock.workers.channels.inbox import Inbox, NamedTensors, Notices
from penstock.workers.channels.tensors import from_frames, num_bytes, to_frames
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.waiting import POLL_S, Abort, WaitBudget

MAX_TENSOR_BYTES = 8 << 30
"""A frame of more bytes ends its sender's connection before it is read."""

MAX_TENSORS = 1024
"""Most tensors in one message; a reduction has one for each block of a stage."""

_UNREAD_MESSAGES = 4
"""Whole messages of a peer that may wait for the communication thread, which takes them as they
come.
"""

_SLACK_BYTES = 1 << 18
"""Headers, and messages that are no transfers. Empty frames take 32 bytes of memory for a byte."""

_LOG_INTERVAL_S = 5.0
_FOLLOW_MS = 1000
"""Milliseconds between checks of an idle inbox on tcp for a new address of its host."""

_REFUSED_S = 15.0
"""A peer that rejects connections for longer is not one that died and left its port to another
process.
"""

_log = logging.getLogger(__name__)


def bounds_of(largest_bytes: int, num_devices: int) -> Bounds:
    """Returns the limits of untaken bytes from peers, for messages of up to ``largest_bytes``:
    waiting messages, the current message, slack.
    """
    messages_bytes = (_UNREAD_MESSAGES + 2) * largest_bytes
    total_bytes = max(2, num_devices) * messages_bytes + _SLACK_BYTES
    return Bounds(
        connections=64 + 8 * num_devices,
        connection_bytes=messages_bytes + _SLACK_BYTES,
        total_bytes=total_bytes,
        silent_bytes=total_bytes,  # the first message of a peer may be a large one
    )


class Transport:
    """Sends and receives for one worker. ``send`` and ``notify`` may be called from several
    threads.
    """

    def __init__(
        self,
        bind_address: str,
        inbox: Inbox,
        metrics: WorkerMetrics,
        access: SocketAccess = OPEN,
    ) -> None:
        """Binds the inbox socket: ``ipc://NAME``, or ``tcp://HOST`` with a port that the system
        chooses. On tcp the socket follows the host to new addresses. ``access``: the credentials of
        peers on tcp, and for them.

        Raises:
            OSError: the host's name is unknown.
            zmq.ZMQError: it cannot listen on ``bind_address``.
        """
        self.inbox = inbox
        self.notices = Notices()
        self.metrics = metrics
        self._context = world.sockets()
        self._access = access
        self._authenticator = ZapAuthenticator(self._context, access)
        self._name: LocalName | None = None
        self._pull = self._context.socket(zmq.PULL)
        self._pull.set(zmq.RCVHWM, _UNREAD_MESSAGES)
        self._pull.set(zmq.MAXMSGSIZE, MAX_TENSOR_BYTES)
        # Set here: libzmq refuses options once the context ends. With its default it would wait for
        # a sender that has gone while the inbox was full.
        self._pull.set(zmq.LINGER, 0)
        try:
            self._home = self._bind(bind_address)
        except BaseException:
            self._authenticator.close()
            self._context.destroy(linger=0)
            self._release_name()
            raise
        self._local_address = "" if self._home else self._pull.get_string(zmq.LAST_ENDPOINT)
        self._limiter: ConnectionLimiter | None = None
        self._peer_filter: LocalPeerFilter | None = None
        if self._home is None:
            self._peer_filter = LocalPeerFilter.where_possible(self._pull)
        else:
            self._limiter = ConnectionLimiter.where_possible(
                self._pull,
                bounds_of(0, 0),
                lambda: metrics.dropped("cut"),
                pre_auth_reply_bytes=access.pre_auth_reply_bytes,
            )
        self._lock = world.lock()
        self._connections: Connections | None = None
        self._peers: dict[int, Connection] = {}
        self._optimizers: dict[int, Connection] = {}
        self._last_complaint_s = -_LOG_INTERVAL_S
        self._thread = world.thread(target=self._receive, name="worker-inbox", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Address of the inbox for peers; changes with this machine's address."""
        return self._local_address if self._home is None else self._home.endpoint

    def connect(
        self,
        peers: Mapping[int, str],
        optimizers: Mapping[int, str],
        lost: Lost | None = None,
        silence_s: float = 10.0,
    ) -> None:
        """Connects to the inboxes of ``peers`` (device -> address) and of optimizerds (node ->
        address). ``lost`` is called for a broken connection, or one with a peer that was silent for
        ``silence_s`` seconds.
        """
        self.disconnect()
        with self._lock:
            made = self._connections = Connections(self._context, silence_s, lost, self._access)
            self._peers = {
                device: made.open(f"worker {device}", address) for device, address in peers.items()
            }
            self._optimizers = {
                node: made.open(f"the optimizerd of node {node}", address)
                for node, address in optimizers.items()
            }
            made.watch()

    def expect(self, largest_bytes: int, num_devices: int) -> None:
        """Allows transfers of up to ``largest_bytes`` from now on, if the inbox listens on tcp."""
        if self._limiter is not None:
            self._limiter.bounds = bounds_of(largest_bytes, num_devices)

    def disconnect(self) -> None:
        """Closes the connections; unsent messages are dropped."""
        with self._lock:
            # Unsent messages belong to a finished epoch: no lingering.
            if self._connections is not None:
                self._connections.close()
            self._connections = None
            self._peers, self._optimizers = {}, {}

    def send(
        self, peer: int, header: Transfer, tensors: NamedTensors, abort: Abort, timeout_s: float
    ) -> None:
        """Queues host tensors of any shape for a peer; this method fills in ``header.tensors``.

        The caller must not write the tensors any more: they are sent without a copy.

        Raises:
            Interrupted: the work was aborted.
            LostMemberError: the peer's queue stayed full for ``timeout_s`` seconds.
            ProtocolError: a type that cannot be sent, or a peer without a connection.
        """
        headers, buffers = to_frames(tensors)
        full = Transfer(
            run_id=header.run_id,
            epoch=header.epoch,
            phase=header.phase,
            attempt=header.attempt,
            kind=header.kind,
            stage=header.stage,
            micro_batch=header.micro_batch,
            tensors=headers,
        )
        what = f"room in the queue to worker {peer} for {header.kind} of stage {header.stage}"
        self._queue(self._peers, peer, [encode(full), *buffers], what, abort, timeout_s)
        self.metrics.transferred("send", header.kind, num_bytes(tensors))

    def notify(
        self, node: int, message: GradientReady | BlockUpdated, abort: Abort, timeout_s: float
    ) -> None:
        """Notifies the optimizerd of a node of complete gradients or weights.

        Raises:
            Interrupted: the work was aborted.
            LostMemberError: the queue of the optimizerd stayed full.
        """
        what = f"room in the queue to the optimizerd of node {node}"
        self._queue(self._optimizers, node, [encode(message)], what, abort, timeout_s)

    def tell(
        self, peer: int, notice: GroupAddress | TransferShape, abort: Abort, timeout_s: float
    ) -> None:
        """Sends a peer a notice about the epoch's process group.

        Raises:
            Interrupted: the work was aborted.
            LostMemberError: the peer's queue stayed full.
        """
        what = f"room in the queue to worker {peer} for {type(notice).__name__}"
        self._queue(self._peers, peer, [encode(notice)], what, abort, timeout_s)

    def close(self) -> None:
        """Closes all sockets and ends the communication thread."""
        self.disconnect()
        for watch in (self._limiter, self._peer_filter):
            if watch is not None:
                watch.close()
        self._authenticator.close()
        self._context.term()  # the thread sees ContextTerminated and closes its socket
        self._thread.join()
        self._release_name()

    def _release_name(self) -> None:
        if self._name is not None:
            self._name.release()

    def _bind(self, address: str) -> HomeSocket | None:
        scheme, _, host = address.partition("://")
        if scheme == "tcp":
            set_handshake_timeout(self._pull)
            self._access.protect(self._pull)
            self._pull.set(zmq.RCVTIMEO, _FOLLOW_MS)
            return HomeSocket(self._pull, host, self._access.announce)
        allow_own_user_only(self._pull)
        self._name = LocalName.take(address, "worker")
        self._pull.bind(address)
        return None

    def _queue(
        self,
        connections: Mapping[int, Connection],
        target: int,
        frames: Sequence[bytes | memoryview],
        what: str,
        abort: Abort,
        timeout_s: float,
    ) -> None:
        budget, start_s = WaitBudget(timeout_s), world.monotonic()
        while True:
            abort.check()
            # A socket belongs to one thread at a time; the lock passes it on, memory fences
            # included.
            with self._lock:
                connection = connections.get(target)
                if connection is None:
                    raise ProtocolError(f"no connection for {what}: the last Begin did not name it")
                try:
                    # Without copies: ZeroMQ holds the buffers until its thread has sent them.
                    connection.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                    return
                except zmq.Again:  # queue full: wait below, outside the lock
                    refusal = connection.refusal()
            if refusal and world.monotonic() - start_s > _REFUSED_S:
                raise LostMemberError(f"no {what}: {refusal}")
            budget.spend(what)
            world.sleep(POLL_S / 10)

    def _receive(self) -> None:
        try:
            while True:
                # This thread alone uses the socket once it runs. Frames alias ZeroMQ's memory until
                # _accept copies them.
                try:
                    frames = self._pull.recv_multipart(copy=False)
                except zmq.Again:
                    frames = []
                if self._home is not None:
                    self._home.follow()
                if not frames:
                    continue
                if self._limiter is not None:
                    self._limiter.heard(frames[0])
                try:
                    self._accept(frames)
                except ProtocolError as error:
                    self._drop("malformed", str(error))
        except zmq.ContextTerminated:
            self._pull.close()

    def _accept(self, frames: Sequence[Any]) -> None:
        if len(frames) > 1 + MAX_TENSORS:
            raise ProtocolError(f"{len(frames)} frames, at most {1 + MAX_TENSORS} are accepted")
        header = decode(frames[0].buffer, Transfer, GroupAddress, TransferShape)
        if isinstance(header, (GroupAddress, TransferShape)):
            refusal = self.notices.put(header)
            if refusal is not None:
                self._drop(refusal, f"{type(header).__name__} of membership {header.epoch}")
            return
        assert isinstance(header, Transfer), "nothing else is decoded"
        refusal = self.inbox.refusal(header)
        if refusal is not None:
            self._drop(refusal, f"membership {header.epoch}, {header.phase} {header.attempt}")
            return
        tensors = from_frames(header.tensors, [frame.buffer for frame in frames[1:]])
        self.inbox.put(header, tensors)
        self.metrics.transferred("receive", header.kind, num_bytes(tensors))

    def _drop(self, reason: str, detail: str) -> None:
        self.metrics.dropped(reason)
        now = world.monotonic()
        if now - self._last_complaint_s > _LOG_INTERVAL_S:
            self._last_complaint_s = now
            _log.warning("dropped a message (%s): %s", reason, detail)
