"""Serves blocks: leases for local processes, and arrays of blocks for any process of the run.

Two ROUTER sockets answer the same requests, one on the node's local ipc address and one on TCP.
They have their own thread, so restores and saves never delay an answer. Bytes go from shared memory
to the socket without a copy. A request for an incomplete array is held back for up to
:data:`HOLD_S`, then answered with ``wait``, and the client retries.

Requests come from the network: every message is answered, answered with an error, or dropped and
counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import zmq

from penstock.host import world
from penstock.host.errors import ConfigError, ProtocolError, StateError
from penstock.host.process_identity import ProcessIdentity
from penstock.protocol.wire.addresses import HomeSocket
from penstock.protocol.wire.connection_limiter import (
    Bounds,
    ConnectionLimiter,
    allow_own_user_only,
    set_handshake_timeout,
)
from penstock.protocol.wire.frames import (
    CHUNK_BYTES,
    ENCRYPTED_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MAX_RANGE_BYTES,
    STATE_WORDS_BYTES,
    AgentOffer,
    AgentReply,
    AgentRequest,
    BlockReply,
    BlockRequest,
    LeaseReply,
    LeaseRequest,
    StateWords,
    decode,
    encode,
)
from penstock.protocol.wire.local_names import LocalName
from penstock.protocol.wire.local_peers import LocalPeerFilter
from penstock.protocol.wire.sockets import ENCRYPTION_BYTES, OPEN, SocketAccess, ZapAuthenticator
from penstock.shm.control import INVALID_VERSION
from penstock.shm.layout import ArrayKey
from penstock.shm.memory import NodeMemory

HOLD_S = 0.05
HOLD_POLL_S = 0.001
IDLE_POLL_S = 0.1
MAX_HELD = 4096
PRUNE_INTERVAL_S = 1.0
STUCK_S = 30.0
"""Seconds after which a turn of the server counts as hung; a normal turn takes milliseconds. A
client of a hung server times out after 60 s, or after ``cluster.attempt_timeout_s``. It is blamed
for the delay until the server reports its hang.
"""
MAX_LEASES = 4096

REQUESTS_UNREAD = 64
"""Limit of unread requests of a connection from another node, which has only a few in flight."""
BOUNDS = Bounds(connections=1024, connection_bytes=2**19, total_bytes=2**23, silent_bytes=2**18)
"""Requests of other nodes have some hundred bytes."""

Status = Literal["ok", "wait", "error"]

_log = logging.getLogger(__name__)


class ServingMetrics(Protocol):
    """Counters of a block server; :class:`~penstock.daemons.memory.metrics.MemoryMetrics` documents
    the methods.
    """

    def answered(self, kind: str, status: str) -> None: ...

    def malformed(self) -> None: ...

    def served(self, num_bytes: int) -> None: ...

    def waiting(self, count: int) -> None: ...

    def leases(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A process that has received the names of the segments."""

    member: str
    process: ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    socket: zmq.Socket[bytes]
    client: bytes
    request: BlockRequest
    until_s: float


class BlockServer:
    """Binds at once, so that clients can connect; serves from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        *,
        run_id: str,
        local_address: str,
        host: str,
        access: SocketAccess = OPEN,
        server: str = "memoryd",
        attempt_timeout_s: float = STUCK_S,
    ) -> None:
        """Binds both sockets. ``access``: the clients that may connect over TCP. ``server``: this
        process's name in errors. ``attempt_timeout_s``: seconds after which a turn counts as hung.

        Raises:
            StateError: another process like this one, of this run and node, is alive: it has the
                local address.
            ConfigError: ``host`` is no address of this machine.
        """
        self._run_id = run_id
        self._server = server
        self._stuck_s = min(STUCK_S, attempt_timeout_s)
        self._context: zmq.Context[Any] = world.sockets()
        self._local = self._router()
        allow_own_user_only(self._local)
        self._remote = self._router()
        set_handshake_timeout(self._remote)
        self._remote.set(zmq.RCVHWM, REQUESTS_UNREAD)
        access.protect(self._remote)
        self._remote_chunk_bytes = ENCRYPTED_CHUNK_BYTES if access.encrypts else CHUNK_BYTES
        self._authenticator = ZapAuthenticator(self._context, access)
        self._name: LocalName | None = None
        self._limiter: ConnectionLimiter | None = None
        self._peer_filter: LocalPeerFilter | None = None
        self._held: list[_Held] = []
        self._leases: dict[int, Lease] = {}
        self._offer: tuple[AgentOffer, ProcessIdentity] | None = None
        self._closing = world.event()
        self._turned_s = float("inf")  # written by the server's thread only
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None
        try:
            self._home = self._bind(local_address, host, access)
        except BaseException:
            self._leave()
            raise
        self._limiter = ConnectionLimiter.where_possible(
            self._remote, BOUNDS, pre_auth_reply_bytes=access.pre_auth_reply_bytes
        )
        self._peer_filter = LocalPeerFilter.where_possible(self._local)

    def start(self, memory: NodeMemory, metrics: ServingMetrics) -> None:
        """Begins to answer requests, including those that arrived since the sockets were bound."""
        self._memory = memory
        self._metrics = metrics
        self._thread = world.thread(target=self._run, name="block-server")
        self._thread.start()

    def close(self) -> None:
        """Stops answering and drops queued messages; the memory may be unmapped afterwards."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._leave()

    def _leave(self) -> None:
        for watch in (self._limiter, self._peer_filter):
            if watch is not None:
                watch.close()
        self._limiter = self._peer_filter = None
        self._authenticator.close()
        self._context.destroy(linger=0)
        if self._name is not None:
            self._name.release()

    @property
    def endpoint(self) -> str:
        """The server's address for other nodes. It changes with this machine's address."""
        return self._home.endpoint

    @property
    def stuck(self) -> bool:
        """True if the current turn has taken longer than the limit for a hang."""
        return world.monotonic() - self._turned_s > self._stuck_s

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Returns the leases of processes that were alive a moment ago."""
        return tuple(self._leases.values())

    def _router(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_HEADER_BYTES + ENCRYPTION_BYTES)
        return socket

    def _bind(self, local_address: str, host: str, access: SocketAccess) -> HomeSocket:
        try:
            self._name = LocalName.take(local_address, self._server)
            self._local.bind(local_address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            raise StateError(
                f"another {self._server} of this run is alive: it listens on {local_address}"
            ) from error
        try:
            return HomeSocket(self._remote, host, access.announce)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(
                f"cluster.nodes host {host!r}: {self._server} cannot listen there: {error}"
            ) from error

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            _log.exception("block server ended")
            self.failure = error
        finally:
            self._turned_s = float("inf")

    def _serve(self) -> None:
        poller = world.poller()
        for socket in (self._local, self._remote):
            poller.register(socket, zmq.POLLIN)
        next_prune_s = 0.0
        while not self._closing.is_set():
            self._turned_s = world.monotonic()
            wait_s = HOLD_POLL_S if self._held else IDLE_POLL_S
            for socket, _ in poller.poll(round(wait_s * 1000)):
                self._receive(socket)
            self._retry_held()
            self._home.follow()
            if world.monotonic() >= next_prune_s:
                self._prune_leases()
                next_prune_s = world.monotonic() + PRUNE_INTERVAL_S

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        """Handles the messages that have arrived on a socket, at most a hundred at a time."""
        for _ in range(100):
            try:
                client, *frames = self._taken(socket)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a request has one frame, got {len(frames)}")
                request: Any = decode(frames[0], *_HANDLERS)
            except ProtocolError as error:
                self._metrics.malformed()
                _log.debug("dropped a message: %s", error)
                continue
            _HANDLERS[type(request)](self, socket, client, request)

    def _taken(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        """Returns the frames of the next message.

        Raises:
            zmq.Again: there is none.
        """
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if socket is self._remote and self._limiter is not None:
            self._limiter.heard(frames[0])
        return [frame.bytes for frame in frames]

    def _on_lease(self, socket: zmq.Socket[bytes], client: bytes, request: LeaseRequest) -> None:
        if self._memory.unlinked:
            return  # The run is over: the client will learn so, or asks the next memoryd.
        error = self._lease_error(request)
        if error:
            reply = LeaseReply(segments=(), digest=b"", undo_bytes=0, error=error)
        else:
            spec = self._memory.spec
            reply = LeaseReply(
                segments=tuple(spec.sizes().items()),
                digest=spec.digest,
                undo_bytes=spec.undo_bytes,
                error="",
            )
        self._metrics.answered("lease", "error" if error else "ok")
        socket.send_multipart([client, encode(reply)])

    def _lease_error(self, request: LeaseRequest) -> str:
        if request.run_id != self._run_id:
            return self._foreign(request.run_id)
        process = ProcessIdentity.of(request.pid)
        if process is None:
            return f"no process {request.pid} lives on this node"
        if len(self._leases) >= MAX_LEASES:
            return f"{MAX_LEASES} processes hold a lease already"
        self._leases[request.pid] = Lease(member=request.member, process=process)
        self._metrics.leases(len(self._leases))
        return ""

    def _foreign(self, run_id: str) -> str:
        return f"this {self._server} serves run {self._run_id}, not {run_id[:40]!r}"

    def _on_offer(self, socket: zmq.Socket[bytes], client: bytes, offer: AgentOffer) -> None:
        """Answers an agent's offer. Only agents of this node are accepted."""
        process = ProcessIdentity.of(offer.pid)
        if socket is not self._local or offer.run_id != self._run_id or process is None:
            self._metrics.malformed()
            return
        self._offer = (offer, process)

    def _on_agent(self, socket: zmq.Socket[bytes], client: bytes, request: AgentRequest) -> None:
        error = ""
        if request.run_id != self._run_id:
            error = self._foreign(request.run_id)
        elif self._offer is None or not self._offer[1].alive():
            self._offer = None
            error = "no fetchd runs on this node now"
        offers = () if self._offer is None or error else (self._offer[0],)
        self._metrics.answered("agent", "error" if error else "ok")
        socket.send_multipart([client, encode(AgentReply(offers=offers, error=error))])

    def _prune_leases(self) -> None:
        self._leases = {p: lease for p, lease in self._leases.items() if lease.process.alive()}
        self._metrics.leases(len(self._leases))

    def _on_block(self, socket: zmq.Socket[bytes], client: bytes, request: BlockRequest) -> None:
        held = _Held(
            socket=socket, client=client, request=request, until_s=world.monotonic() + HOLD_S
        )
        error = self._block_error(request)
        if error:
            self._reply(held, "error", error=error)
        elif self._is_complete(request):
            self._send_range(held)
        elif len(self._held) < MAX_HELD:
            self._held.append(held)
        else:
            self._reply(held, "wait")

    def _retry_held(self) -> None:
        still: list[_Held] = []
        now_s = world.monotonic()
        for held in self._held:
            if self._is_complete(held.request):
                self._send_range(held)
            elif error := self._block_error(held.request):  # a sweep has led the state on meanwhile
                self._reply(held, "error", error=error)
            elif now_s >= held.until_s:
                self._reply(held, "wait")
            else:
                still.append(held)
        self._held = still
        self._metrics.waiting(len(still))

    def _block_error(self, request: BlockRequest) -> str:
        """Returns why the request can never be answered, or an empty text."""
        if request.run_id != self._run_id:
            return self._foreign(request.run_id)
        key = self._key(request)
        if request.array == "words":
            held = self._known(request.block)
        else:
            held = self._memory.has(key)
        if not held:
            return f"node {self._memory.spec.node_name} holds no {request.array} {key}"
        if request.array == "state" and self._memory.control.incarnation:
            state = self._words(request.block).state_version
            if state not in (request.version, INVALID_VERSION):
                return f"state of block {request.block} is at version {state}"
        if request.array == "grads" and request.attempt <= self._memory.control.lost_attempt:
            return f"gradients of attempt {request.attempt} were lost with this node's memory"
        array_bytes = self._array_bytes(request)
        end = request.offset + request.num_bytes
        if request.num_bytes > MAX_RANGE_BYTES or end > array_bytes:
            return (
                f"range [{request.offset}, {end}) of {request.array} {key}: the array has"
                f" {array_bytes} bytes, a range at most {MAX_RANGE_BYTES}"
            )
        return ""

    def _is_complete(self, request: BlockRequest) -> bool:
        control = self._memory.control
        if control.incarnation == 0:
            return False
        if request.array == "weights":
            return control.readable(request.block, request.version)
        if request.array == "grads":
            # Or a later one: a new optimizerd asks for committed gradients again, with epoch 0; the
            # next attempt may have set the word by then, but it fills the other copy.
            epoch, attempt = control.ready(request.block, request.contribution)
            kept = request.attempt > control.lost_attempt
            return kept and epoch >= request.epoch and attempt >= request.attempt
        if request.array == "state":
            return self._words(request.block).state_version == request.version
        return True

    def _words(self, block: int) -> StateWords:
        control, sweep = self._memory.control, self._memory.control.interrupted_sweep
        moving = sweep is not None and sweep.block == block
        version = INVALID_VERSION if moving else control.state_version(block)
        return StateWords(incarnation=control.incarnation, state_version=version)

    def _key(self, request: BlockRequest) -> ArrayKey:
        """Returns which array of the node's layout is asked for; of state with two copies the one
        of its version.
        """
        block, name, copy, contribution = request.key
        if request.array == "state" and name not in ("low", "weights"):
            copy = self._memory.state_copy(block, request.version) if self._known(block) else 0
        return (block, name, copy, contribution)

    def _known(self, block: int) -> bool:
        return 0 <= block < len(self._memory.spec.table.blocks)

    def _send_range(self, held: _Held) -> None:
        request = held.request
        end = request.offset + request.num_bytes
        if request.array == "words":
            raw = memoryview(self._words(request.block).pack())
        else:
            raw = self._memory.raw(self._key(request))
        size = self._remote_chunk_bytes if held.socket is self._remote else CHUNK_BYTES
        chunks = [raw[start : min(start + size, end)] for start in range(request.offset, end, size)]
        self._metrics.served(request.num_bytes)
        self._reply(held, "ok", chunks=chunks)

    def _reply(
        self,
        held: _Held,
        status: Status,
        *,
        error: str = "",
        chunks: list[memoryview] | None = None,
    ) -> None:
        request = held.request
        reply = BlockReply(
            status=status,
            block=request.block,
            version=request.version,
            offset=request.offset,
            num_bytes=request.num_bytes,
            array_bytes=0 if error else self._array_bytes(request),
            error=error,
        )
        self._metrics.answered(request.array, status)
        # A ROUTER never blocks: answers to clients that are gone, or read nothing, are dropped.
        held.socket.send_multipart([held.client, encode(reply), *(chunks or ())], copy=False)

    def _array_bytes(self, request: BlockRequest) -> int:
        if request.array == "words":
            return STATE_WORDS_BYTES
        return self._memory.spec.layout.arrays[self._key(request)].num_bytes


_Handler = Callable[[BlockServer, zmq.Socket[bytes], bytes, Any], None]
_HANDLERS: dict[type, _Handler] = {
    LeaseRequest: BlockServer._on_lease,
    AgentOffer: BlockServer._on_offer,
    AgentRequest: BlockServer._on_agent,
    BlockRequest: BlockServer._on_block,
}
