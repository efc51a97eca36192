"""Clients of memoryd: leases on a node's shared memory, and arrays of blocks that other nodes own.

Every wait has a deadline. A client belongs to one thread, as ZeroMQ sockets do. The serving side is
:mod:`penstock.daemons.memory.server`; the messages are in :mod:`penstock.protocol.wire.frames`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import zmq

from penstock.host import world
from penstock.host.errors import LostMemberError, PenstockError, ProtocolError, StateError
from penstock.protocol.run.names import ipc_address
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.frames import (
    CHUNK_BYTES,
    MAX_RANGE_BYTES,
    BlockReply,
    BlockRequest,
    LeaseReply,
    LeaseRequest,
    decode,
    encode,
)
from penstock.protocol.wire.sockets import ENCRYPTION_BYTES, OPEN, Connection, SocketAccess
from penstock.shm.bases import UnfilledBaseError
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import SegmentError, SegmentMissingError

MEMORY_SOCKET = "memory"
"""Name of memoryd's local socket, see :func:`penstock.protocol.run.names.ipc_address`."""

_POLL_INTERVAL_MS = 20
_LEASE_POLL_MS = 100
_RESEND_AFTER_S = 2.0
_UNFILLED_POLL_S = 0.1
_WINDOW = 4
"""Ranges requested at once: 8 MiB keep 25 Gbit/s busy over 2 ms."""


class FetchCancelledError(PenstockError):
    """The caller's ``cancelled`` said so; the buffer holds an unknown mixture."""


class LeaseCancelledError(PenstockError):
    """The caller's ``cancelled`` said so; nothing is mapped."""


def attach(
    run_dir: RunDirectory,
    node: int,
    member: str,
    *,
    timeout_s: float = 60.0,
    kinds: Collection[SegmentKind] = tuple(SegmentKind),
    writable: bool = True,
    cancelled: Callable[[], bool] = lambda: False,
) -> NodeMemory:
    """Requests a lease from the node's memoryd, then maps its memory (the control segment and
    ``kinds``).

    Waits for a memoryd that is still starting, and for bases that are still filled.

    Raises:
        LostMemberError: no answer within ``timeout_s`` seconds. LeaseCancelledError.
        StateError: the lease is refused, or the segments do not fit this run's plan and model.
    """
    spec = run_dir.memory_spec(node)
    deadline_s = world.monotonic() + timeout_s
    missing: SegmentMissingError | None = None
    tries = 2  # memoryd may have ended since its first answer, and given memory back
    while tries:
        _lease(run_dir, spec, member, timeout_s, cancelled)
        try:
            return NodeMemory.attach(spec, kinds, writable=writable)
        except SegmentMissingError as error:
            missing = error
            tries -= 1
        except UnfilledBaseError as error:
            if cancelled():
                raise LeaseCancelledError(f"{member}: stopped while bases were filled") from error
            if world.monotonic() >= deadline_s:
                raise LostMemberError(f"{member}: {error} within {timeout_s:g} s") from error
            world.sleep(_UNFILLED_POLL_S)
        except SegmentError as error:
            raise StateError(f"memory of node {spec.node_name}: {error}") from error
    raise StateError(
        f"memory of node {spec.node_name} was removed from /dev/shm while the run is active: by"
        " the epilogue of another job, or by logind (RemoveIPC). Keep them away from"
        " /dev/shm/penstock-*, and start again: the run continues from the newest saved state"
    ) from missing


def _lease(
    run_dir: RunDirectory,
    spec: MemorySpec,
    member: str,
    timeout_s: float,
    cancelled: Callable[[], bool],
) -> None:
    address = ipc_address(spec.run_id, spec.node_name, MEMORY_SOCKET)
    with world.sockets() as context:
        request = LeaseRequest(run_id=spec.run_id, member=member, pid=world.pid())
        reply = request_lease(context, address, request, timeout_s=timeout_s, cancelled=cancelled)
    if reply.digest != spec.digest:
        raise StateError(
            f"memoryd.{spec.node_name} holds memory made for another model, plan or optimizer than"
            f" {run_dir.path}: stop the run and start it again"
        )


def request_lease(
    context: zmq.Context[Any],
    address: str,
    request: LeaseRequest,
    *,
    timeout_s: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> LeaseReply:
    """Sends one lease request, and returns the reply.

    Raises:
        StateError: the lease is refused.
    """
    socket = connect(context, address)
    try:
        socket.send(encode(request))
        asked_s = world.monotonic()
        deadline_s = asked_s + timeout_s
        while not socket.poll(_LEASE_POLL_MS):
            if world.monotonic() - asked_s > _RESEND_AFTER_S:
                # A memoryd that was killed had received the request; its successor did not.
                asked_s = world.monotonic()
                with suppress(zmq.Again):
                    socket.send(encode(request), zmq.NOBLOCK)
            if cancelled():
                raise LeaseCancelledError(f"{request.member}: stopped while memoryd was awaited")
            if world.monotonic() >= deadline_s:
                raise LostMemberError(
                    f"{request.member}: no lease from memoryd at {address} within {timeout_s:g} s;"
                    " is it running?"
                )
        reply = decode(socket.recv(), LeaseReply)
    finally:
        socket.close(linger=0)
    if reply.error:
        raise StateError(f"{request.member}: memoryd at {address} gives no lease: {reply.error}")
    return reply


Pace = Callable[[int, Callable[[], bool]], None]
"""Called with a number of bytes that arrived and ``cancelled``; returns when they are to count as
arrived.
"""


class BlockClient:
    """Copies arrays of blocks from memoryds into the caller's buffers, one connection each."""

    def __init__(
        self,
        context: zmq.Context[Any],
        pace: Pace | None = None,
        access: SocketAccess = OPEN,
    ) -> None:
        """Creates a client. ``pace`` delays an array that has arrived; ``access``: credentials for
        memoryds on TCP.
        """
        self._context = context
        self._pace = pace
        self._access = access
        self._connections: dict[str, Connection] = {}

    def fetch(
        self,
        address: str,
        request: BlockRequest,
        out: Any,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fills ``out`` (a writable contiguous buffer of exactly the array's size) with the array.

        ``offset`` and ``num_bytes`` of ``request`` are set here. Retries while the memoryd replies
        that the array is not complete yet, and after a timeout: requests change nothing.

        Raises:
            LostMemberError: the array is not complete within ``timeout_s`` seconds; names the
                awaited array.
        """
        view = memoryview(out)
        if not view.nbytes:  # an empty view cannot be cast
            return
        view = view.cast("B")
        fetch = _Fetch(request, view)
        deadline = world.monotonic() + timeout_s
        try:
            self._run(address, fetch, deadline, cancelled)
        except BaseException:
            self._drop(address)  # answers to this request may still arrive on the old connection
            raise
        if fetch.unfinished:
            fetch.last_answer = self._connection(address).refusal() or fetch.last_answer
            self._drop(address)
            raise LostMemberError(
                f"{fetch.describe()} from memoryd at {address}: {fetch.num_received} of"
                f" {len(view)} bytes after {timeout_s:g} s ({fetch.last_answer})"
            )
        if self._pace is not None and not address.startswith("ipc:"):  # no NIC is on that way
            self._pace(len(view), cancelled)

    def close(self) -> None:
        """Closes all connections."""
        for address in list(self._connections):
            self._drop(address)

    def _run(
        self, address: str, fetch: _Fetch, deadline: float, cancelled: Callable[[], bool]
    ) -> None:
        last_answer = now = world.monotonic()
        while fetch.unfinished and now < deadline:
            if cancelled():
                raise FetchCancelledError(
                    f"{fetch.describe()} from memoryd at {address}: cancelled"
                )
            socket = self._connection(address).socket
            fetch.ask(socket)
            if socket.poll(_POLL_INTERVAL_MS):
                fetch.take(socket)
                last_answer = world.monotonic()
            elif now - last_answer > _RESEND_AFTER_S:
                fetch.last_answer = self._connection(address).refusal() or fetch.last_answer
                self._drop(address)
                fetch.forget_asked()
                last_answer = now
            now = world.monotonic()

    def _connection(self, address: str) -> Connection:
        if address not in self._connections:
            connection = Connection(_dealer(self._context), address, self._access)
            self._connections[address] = connection
        return self._connections[address]

    def _drop(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()


class _Fetch:
    """One array in transfer: ranges to request, requested ranges, and received ranges."""

    def __init__(self, request: BlockRequest, view: memoryview) -> None:
        self._request = request
        self._view = view
        self._to_ask = deque(range(0, len(view), MAX_RANGE_BYTES))
        self._asked: set[int] = set()
        self._window = _WINDOW
        self.num_received = 0
        self.last_answer = "no answer"

    @property
    def unfinished(self) -> bool:
        return self.num_received < len(self._view)

    def describe(self) -> str:
        r = self._request
        expected_fields = {
            "weights": f"weights of block {r.block} at version {r.version}",
            "frozen": f"frozen weights of block {r.block}",
            "grads": f"gradients of block {r.block}, contribution {r.contribution},"
            f" membership {r.epoch}, attempt {r.attempt}",
            "state": f"{r.name} of block {r.block} at version {r.version}",
            "words": f"state version of block {r.block}",
        }
        return expected_fields[r.array]

    def ask(self, socket: zmq.Socket[bytes]) -> None:
        """Sends requests until the window is full."""
        while self._to_ask and len(self._asked) < self._window:
            offset = self._to_ask[0]
            request = dataclasses.replace(
                self._request, offset=offset, num_bytes=self._range_bytes(offset)
            )
            try:
                socket.send(encode(request), zmq.NOBLOCK)
            except zmq.Again:
                return  # libzmq gave the connection up: silence follows, and a new one
            self._asked.add(self._to_ask.popleft())

    def forget_asked(self) -> None:
        """Forgets requests in flight, because the connection is new."""
        self._to_ask.extendleft(sorted(self._asked, reverse=True))
        self._asked.clear()

    def take(self, socket: zmq.Socket[bytes]) -> None:
        """Receives one answer, with its bytes directly in the buffer."""
        reply = decode(socket.recv(), BlockReply)
        self.last_answer = reply.status
        if reply.status == "error":
            raise ProtocolError(f"{self.describe()}: memoryd refuses: {reply.error}")
        if reply.block != self._request.block or reply.offset not in self._asked:
            raise ProtocolError(
                f"{self.describe()}: got an answer for block {reply.block},"
                f" offset {reply.offset}, which was not requested"
            )
        self._asked.remove(reply.offset)
        if reply.status == "wait":
            self._to_ask.appendleft(reply.offset)
            self._window = 1  # until a range is here: a wait would answer all of them
            return
        if reply.array_bytes != len(self._view):
            raise ProtocolError(
                f"{self.describe()}: has {reply.array_bytes} bytes there, expected"
                f" {len(self._view)}; do both nodes run the same plan?"
            )
        self._receive_range(socket, reply.offset)
        self._window = _WINDOW

    def _receive_range(self, socket: zmq.Socket[bytes], offset: int) -> None:
        end = offset + self._range_bytes(offset)
        start = offset
        while start < end:
            num_bytes = socket.recv_into(self._view[start:end]) if socket.get(zmq.RCVMORE) else 0
            if not 0 < num_bytes <= end - start:
                raise ProtocolError(f"{self.describe()}: a frame of the answer is missing or long")
            start += num_bytes
        if socket.get(zmq.RCVMORE):
            raise ProtocolError(f"{self.describe()}: the answer has too many frames")
        self.num_received += end - offset

    def _range_bytes(self, offset: int) -> int:
        return min(MAX_RANGE_BYTES, len(self._view) - offset)


def connect(
    context: zmq.Context[Any], address: str, access: SocketAccess = OPEN
) -> zmq.Socket[bytes]:
    """Returns a socket for requests to a memoryd, which need not be there yet.

    Raises:
        ProtocolError: the address lacks the key that ``access`` needs.
    """
    socket = _dealer(context)
    try:
        access.connect(socket, address)
    except ProtocolError:
        socket.close()
        raise
    return socket


def _dealer(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RECONNECT_IVL, 20)
    socket.set(zmq.MAXMSGSIZE, CHUNK_BYTES + ENCRYPTION_BYTES)
    return socket
