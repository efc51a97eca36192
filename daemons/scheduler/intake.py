"""The event queue before the machine's thread, and limits for callers.

All input of members is bounded: the size of texts, and the messages of a stream that wait for the
machine. A reader that is ahead waits, and gRPC's flow control then makes its peer wait.

gRPC accepts a call as soon as its headers arrive, and waits for the first message without a limit.
A call without its message is pending, and so is a stream without an accepted Hello.
:class:`PendingConnections` bounds their number and time, and cuts the oldest first. A call can be
ended with a status, which waits behind unread messages of the caller. After a timeout,
:class:`Caller` resets the connection instead.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import queue
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from penstock.daemons.scheduler.machine.events import Event
from penstock.host import world
from penstock.host.logs import Complaints
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.security.admission import Admission, Party
from penstock.protocol.security.identity import Role

MAX_UNREAD = 16
"""Messages of one stream that wait for the machine."""
MAX_NAME = 128
"""Characters of a name or address."""
MAX_PEERS = 16384
"""Peers that a Hello may request addresses of."""
MAX_FACTS = 64
"""Facts of a device that a Hello may bring."""
MAX_TEXT = 16384
"""Characters of an error that is shown to the user."""

_log = logging.getLogger(__name__)


class StreamCredit:
    """Free places for waiting messages of one stream. Made and taken on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = world.lock()  # guards the two fields below; no call waits while it is held
        self._free = MAX_UNREAD
        self._awaited: asyncio.Future[None] | None = None

    async def take(self) -> None:
        """Takes a place, and waits for one if needed. For one reader at a time."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            awaited = self._awaited = self._loop.create_future()
        await awaited

    def give_back(self) -> None:
        """Frees a place, from any thread: the machine has taken a message."""
        with self._lock:
            awaited, self._awaited = self._awaited, None
            if awaited is None:
                self._free += 1
        if awaited is not None:
            self._loop.call_soon_threadsafe(_grant, awaited)


def _grant(awaited: asyncio.Future[None]) -> None:
    if not awaited.done():  # its reader may have gone
        awaited.set_result(None)


class EventQueue:
    """The queue before the machine. ``put`` may be called by any thread, and by signal handlers."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, StreamCredit | None]] = world.queue()

    def put(self, event: Event, room: StreamCredit | None = None) -> None:
        """Puts an event into the queue. ``room`` gets its place back when the event is taken."""
        self._queue.put((event, room))

    def get(self, timeout: float) -> Event:
        """Returns the next event.

        Raises:
            queue.Empty: none came within ``timeout`` seconds.
        """
        event, room = self._queue.get(timeout=timeout)
        if room is not None:
            room.give_back()
        return event


def malformed(hello: pb.Hello) -> str:
    """Returns why a Hello cannot be one of a member, or an empty text; called before it is used."""
    named = {
        "run_id": hello.run_id,
        "member": hello.member,
        "data_endpoint": hello.data_endpoint,
    }
    for name, text in named.items():
        if len(text) > MAX_NAME or not text.isprintable():
            return f"Hello.{name}: {len(text)} characters, at most {MAX_NAME} printable ones"
    texts = [text for fact in hello.facts for text in (fact.name, fact.value)]
    if len(texts) > 2 * MAX_FACTS or any(
        len(text) > MAX_NAME or not text.isprintable() for text in texts
    ):
        return (
            f"Hello.facts: {len(texts) // 2} facts, at most {MAX_FACTS} of {MAX_NAME} printable"
            " characters"
        )
    peers = hello.peers.members
    if len(peers) > MAX_PEERS or any(len(peer) > MAX_NAME for peer in peers):
        return f"Hello.peers: {len(peers)} names, at most {MAX_PEERS} of {MAX_NAME} characters"
    return ""


def cut_short(message: pb.MemberMessage) -> pb.MemberMessage:
    """Returns a message with its free texts cut to a length for logs and screens."""
    kind = message.WhichOneof("body")
    for name, limit in _TEXTS.get(kind or "", {}).items():
        body = getattr(message, str(kind))
        text = getattr(body, name)
        if len(text) > limit:
            setattr(body, name, text[:limit] + "…")
    return message


_TEXTS = {
    "heartbeat": {"activity": 4 * MAX_NAME},
    "failed": {"error": MAX_TEXT},
    "saved": {"error": MAX_TEXT},
    "fenced": {"member": MAX_NAME, "death": MAX_NAME},
    "cut_off": {"loss": 4 * MAX_NAME},
}
"""Longest free texts in characters, by kind of message and field."""


END_TIMEOUT_S = 1.0
"""Seconds to wait until a status is sent, before the connection is reset."""

T = TypeVar("T")


class SentAway(Exception):
    """The caller was sent away while a call was handled."""


class Caller:
    """The other end of one call; everything happens on the event loop of the call."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._away = asyncio.get_running_loop().create_future()

    @property
    def is_sent_away(self) -> bool:
        """True after :meth:`send_away`."""
        return self._away.done()

    def send_away(self) -> None:
        """Requests the end of the call, in any state of it."""
        if not self._away.done():
            self._away.set_result(None)

    async def unless_sent_away(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of ``work``.

        Raises:
            SentAway: the caller was sent away before; the work was cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._away), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if self.is_sent_away and not task.done():
            with suppress(asyncio.CancelledError, Exception):
                await task
            raise SentAway
        return task.result()

    async def end(self) -> None:
        """Ends the call of a caller that was sent away.

        Raises:
            grpc.aio.AbortError: always, as gRPC wants it.
        """
        ending = asyncio.ensure_future(
            self._context.abort(grpc.StatusCode.CANCELLED, "sent away by the scheduler")
        )
        await asyncio.wait((ending,), timeout=END_TIMEOUT_S)
        if not ending.done():
            peer = self._context.peer()
            _log.debug("%s does not take its status", peer)
            reset_connection(peer)
        await ending


def reset_connection(peer: str) -> None:
    """Resets this process's TCP connection with ``peer``, if there is one. gRPC writes a peer as
    ``ipv4:HOST:PORT`` or ``ipv6:[HOST]:PORT``.
    """
    kind, _, place = peer.partition(":")
    host, _, port = place.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return
    address = host.strip("[]"), int(port)
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError, ValueError):
            if not stat.S_ISSOCK(os.stat(entry).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.getpeername()[:2] == address:
                    _reset(connection)


def _reset(connection: socket.socket) -> None:
    """Connects a TCP socket to no address, which resets it in Linux (connect(2))."""
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), nowhere, len(nowhere))


if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

PATIENCE_S = 3.0
"""Seconds that a connection may be pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingConnection:
    cut: Callable[[], Any]
    due_s: float


class PendingConnections:
    """Calls without their first message, and streams without an accepted Hello."""

    def __init__(self, limit: int) -> None:
        """Allows ``limit`` pending connections at a time."""
        self._limit = limit
        self._next = 1
        self._present: dict[int, _PendingConnection] = {}  # in the order in which they came
        self._complaints = Complaints(_log)

    def enter(self, cut: Callable[[], Any]) -> int:
        """Adds a connection, which ``cut`` ends; returns its number for :meth:`leave`."""
        connection = _PendingConnection(cut=cut, due_s=world.monotonic() + PATIENCE_S)
        number, self._next = self._next, self._next + 1
        self._present[number] = connection
        surplus = []
        while len(self._present) > self._limit:
            surplus.append(self._present.pop(next(iter(self._present))))
        self._send_away(surplus, f"over {self._limit} calls and streams of strangers")
        return number

    def leave(self, number: int) -> None:
        """Forgets a connection that was accepted or closed."""
        self._present.pop(number, None)

    def expire(self, now_s: float) -> None:
        """Cuts connections that have been pending for too long."""
        late = [number for number, s in self._present.items() if s.due_s < now_s]
        overdue = [self._present.pop(number) for number in late]
        self._send_away(overdue, f"nothing said for {PATIENCE_S:g} s")

    def _send_away(self, pending: list[_PendingConnection], reason: str) -> None:
        for connection in pending:
            connection.cut()
        if pending:
            self._complaints.say(f"{len(pending)} calls or streams cut: {reason}")


LOOKING = frozenset(Role)
"""Roles that may call Status and the services for health and reflection: all."""
MAY_CALL = {
    "/penstock.v1.Membership/Join": frozenset((Role.NODE,)),
    "/penstock.v1.Control/Pause": frozenset((Role.CONTROL,)),
    "/penstock.v1.Control/Resume": frozenset((Role.CONTROL,)),
    "/penstock.v1.Control/Snapshot": frozenset((Role.CONTROL, Role.NODE)),
    "/penstock.v1.Control/Weights": frozenset((Role.CONTROL,)),
    "/penstock.v1.Control/Stop": frozenset((Role.CONTROL, Role.NODE)),
}
"""Roles that may call a method; :data:`LOOKING` for methods without an entry. A node forwards a
stop, and requests a save before its machine shuts down.
"""


class CallAuthorizer:
    """Authenticates callers, and checks which methods their roles allow."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._complaints = Complaints(_log)

    async def admit(self, method: str, context: Any) -> Party:
        """Returns the caller of ``method``; aborts calls that the caller may not make."""
        party, allowed = self._admission.party(context), MAY_CALL.get(method, LOOKING)
        name = method.rpartition("/")[2]
        if party is None:
            self._complaints.say(f"{name}: called by a stranger from {context.peer()}")
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the caller has no key of this run"
            )
        elif not party.roles & allowed:
            names, roles = ", ".join(sorted(allowed)), ", ".join(sorted(party.roles))
            words = f"{name} is for the role {names}; these keys: {roles}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, words)
        assert party is not None
        return party


class AuthInterceptor(_Interceptor):
    """Authenticates calls before their handlers, which start when the message has arrived.

    ``own``: methods that authenticate callers themselves. Streams of answers to one message
    (``Watch`` of the health service) are not served: each would be there for ever.
    """

    def __init__(
        self, pending: PendingConnections, authorizer: CallAuthorizer, own: frozenset[str]
    ) -> None:
        self._pending = pending
        self._authorizer = authorizer
        self._own = own

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Returns the handler of a method, with the wait for the message in ours."""
        handler = await continuation(details)
        if handler is None or details.method in self._own:
            return handler
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._bounded(details.method, handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.request_streaming or handler.response_streaming:
            return None
        return grpc.stream_unary_rpc_method_handler(
            self._awaited(details.method, handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _awaited(self, method: str, call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def handle(requests: AsyncIterator[Any], context: Any) -> Any:
            await self._authorizer.admit(method, context)
            caller, request = Caller(context), None
            number = self._pending.enter(caller.send_away)
            try:
                request = await caller.unless_sent_away(context.read())
            except SentAway:
                _log.debug("a call without its message was cut")
            finally:
                self._pending.leave(number)
            if caller.is_sent_away:
                await caller.end()
            if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
            return await call(request, context)

        return handle

    def _bounded(self, method: str, call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Returns a handler of a conversation that has to end within :data:`PATIENCE_S`."""

        async def handle(requests: AsyncIterator[Any], context: Any) -> None:
            async def talk() -> None:
                async for answer in call(requests, context):
                    await context.write(answer)

            await self._authorizer.admit(method, context)
            caller = Caller(context)
            number = self._pending.enter(caller.send_away)
            try:
                await caller.unless_sent_away(talk())
            except SentAway:
                _log.debug("a conversation was cut")
            finally:
                self._pending.leave(number)
            if caller.is_sent_away:
                await caller.end()

        return handle
