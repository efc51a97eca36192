"""The scheduler's gRPC server: streams of members and control calls become events in one queue.

One thread with an event loop serves all streams and calls (gRPC has a few threads of its own). The
machine's thread only passes messages to that loop, so no peer can block it. A member that stops
reading fills its own queue, and then loses its stream. Input is bounded, too
(:mod:`penstock.daemons.scheduler.intake`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent import futures
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.daemons.scheduler.intake import (
    AuthInterceptor,
    CallAuthorizer,
    Caller,
    EventQueue,
    PendingConnections,
    SentAway,
    StreamCredit,
    cut_short,
    malformed,
)
from penstock.daemons.scheduler.machine.events import (
    ControlAsked,
    ControlCall,
    Joined,
    Received,
    Reply,
    ReplyError,
    StreamClosed,
)
from penstock.host.errors import ConfigError
from penstock.host.logs import Complaints
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.security.admission import Admission, Party
from penstock.protocol.security.token import describe_listener

MAX_QUEUED = 4096
"""Messages that wait to be written to one member."""
MIN_PENDING = 16
"""Pending connections at a time: streams without an accepted Hello, and calls without a message.
With more members than that, the limit is their number. A member sends Hello with the first bytes of
its stream, and retries if it was cut.
"""
LAST_WORDS_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 5.0
WATCHED_S = 2.0
"""Seconds after a status call for which the caller counts as a watcher of the run."""
FAREWELL_S = 1.0
"""Seconds that the end of the run waits for watchers."""
SNAPSHOT_TIMEOUT_S = 3600.0
WEIGHTS_TIMEOUT_S = 86400.0
MAX_CALLS = 16
MAX_SNAPSHOTS = 4
"""Calls that save or copy at a time. They may wait for long, and must leave room for others."""
_TIMEOUTS_S = MappingProxyType(
    {ControlCall.SNAPSHOT: SNAPSHOT_TIMEOUT_S, ControlCall.WEIGHTS: WEIGHTS_TIMEOUT_S}
)
"""Seconds that calls may wait that save or copy."""
MAX_PATH = 4096
"""Characters of a folder's path."""
MAX_MESSAGE_BYTES = 2**20
"""Bytes of a member's longest message: Saved has about a hundred bytes a block."""
MAX_WAITING = 1024
"""Calls and streams at a time, in addition to two of each member; more are rejected."""

_NAMES = ("penstock.v1.Membership", "penstock.v1.Control")
_JOIN = "/penstock.v1.Membership/Join"
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 32),  # of one connection
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 60000),  # without a stream or call
)
Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)


class _MemberStream:
    """The server's end of one member's stream."""

    def __init__(self, number: int, context: Context) -> None:
        self.number = number
        self.due_s: float | None = None
        """Time at which the stream is cut; None while it may go on."""
        self.pending = 0
        """Number among pending connections until the machine has accepted the stream."""
        self.room = StreamCredit()
        self.caller = Caller(context)
        self._context = context
        self._outgoing: asyncio.Queue[pb.SchedulerMessage | None] = asyncio.Queue(MAX_QUEUED)

    def put(self, message: pb.SchedulerMessage) -> None:
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            _log.warning("stream %d: %d messages unread: cut", self.number, MAX_QUEUED)
            self.caller.send_away()

    def finish(self) -> None:
        """Ends the stream after its queue is written, or after a timeout."""
        self.due_s = time.monotonic() + LAST_WORDS_TIMEOUT_S
        try:
            self._outgoing.put_nowait(None)
        except asyncio.QueueFull:
            self.caller.send_away()

    async def read(self) -> pb.MemberMessage | None:
        """Returns the next message; None when there are no more."""
        message = await self._context.read()
        return message if isinstance(message, pb.MemberMessage) else None

    async def write(self) -> None:
        """Writes the queue until the stream is finished."""
        while (message := await self._outgoing.get()) is not None:
            await self._context.write(message)


class _Servicer(rpc.MembershipServicer, rpc.ControlServicer):
    """Turns calls into events. Everything here happens on the event loop."""

    def __init__(
        self,
        events: EventQueue,
        pending: PendingConnections,
        homes: Mapping[str, str],
        authorizer: CallAuthorizer,
    ) -> None:
        self._events = events
        self._pending = pending
        self._homes = homes
        self._authorizer = authorizer
        self._complaints = Complaints(_log)
        self._num_snapshots = 0
        self._next_stream = self._next_ticket = 1
        self.streams: dict[int, _MemberStream] = {}
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self._watchers: dict[str, float] = {}
        self._last_status: pb.StatusReply | None = None
        self._all_told = asyncio.Event()

    # ---- members ----

    async def Join(self, requests: AsyncIterator[pb.MemberMessage], context: Context) -> None:
        party = await self._authorizer.admit(_JOIN, context)
        stream = _MemberStream(self._next_stream, context)
        self._next_stream += 1
        self.streams[stream.number] = stream
        stream.pending = self._pending.enter(stream.caller.send_away)
        reader = asyncio.create_task(self._read(stream, party))
        # Finished, not cut, when the messages end: that could overtake the last of them.
        reader.add_done_callback(lambda _: stream.finish())
        try:
            await stream.caller.unless_sent_away(stream.write())
        except SentAway:
            _log.debug("stream %d is cut", stream.number)
        finally:
            reader.cancel()
            self._events.put(StreamClosed(stream=stream.number))
            del self.streams[stream.number]
            self._pending.leave(stream.pending)
        if stream.caller.is_sent_away:
            await stream.caller.end()

    async def _read(self, stream: _MemberStream, party: Party) -> None:
        try:
            await self._read_until_end(stream, party)
        except Exception as error:  # gRPC raises many kinds when a call ends or cannot be parsed
            _log.debug("stream %d broke: %r", stream.number, error)

    async def _read_until_end(self, stream: _MemberStream, party: Party) -> None:
        first = await stream.read()
        odd = "no Hello"
        if first is not None and first.HasField("hello"):
            odd = malformed(first.hello)
        if first is None or odd:
            self._complaints.say(f"stream {stream.number}: {odd}: cut")
            stream.caller.send_away()
            return
        member = first.hello.member
        if not party.speaks_for(self._homes.get(member, "")):
            odd = f"keys of node {party.node} do not speak for {member}"
            self._complaints.say(f"stream {stream.number}: {odd}: refused")
            self.refuse(stream.number, odd)
            return
        self._events.put(Joined(stream=stream.number, hello=first.hello))
        while (message := await stream.read()) is not None:
            await stream.room.take()
            received = Received(stream=stream.number, message=cut_short(message))
            self._events.put(received, stream.room)

    def accept(self, number: int) -> None:
        """Notes that the machine accepted a stream."""
        stream = self.streams.get(number)
        if stream is not None:
            self._pending.leave(stream.pending)

    def put(self, number: int, message: pb.SchedulerMessage) -> None:
        """Puts a message into the queue of a stream, if the stream is open."""
        stream = self.streams.get(number)
        if stream is not None:
            stream.put(message)

    def refuse(self, number: int, reason: str) -> None:
        """Sends Refused and ends the stream."""
        stream = self.streams.get(number)
        if stream is not None:
            stream.put(pb.SchedulerMessage(refused=pb.Refused(reason=reason)))
            stream.finish()

    def disconnect(self, number: int) -> None:
        """Ends a stream now."""
        stream = self.streams.get(number)
        if stream is not None:
            stream.caller.send_away()

    def beat(self, numbers: list[int]) -> None:
        """Sends a heartbeat on streams, and cuts overdue ones: pending, or with unread last
        messages.
        """
        now_s = time.monotonic()
        for number in numbers:
            self.put(number, _HEARTBEAT)
        self._pending.expire(now_s)
        for stream in self.streams.values():
            if stream.due_s is not None and stream.due_s < now_s:
                stream.due_s = None
                stream.caller.send_away()

    def finish(self) -> None:
        """Ends all calls and streams after their queues are written."""
        for ticket in list(self.calls):
            self.answer(ticket, _Ending("the scheduler ends"))
        for stream in self.streams.values():
            stream.finish()

    # ---- control ----

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        if self._last_status is not None:
            self._watchers.pop(context.peer(), None)
            if not self._watchers:
                self._all_told.set()
            return self._last_status
        self._forget_watchers()
        self._watchers[context.peer()] = time.monotonic()
        reply: pb.StatusReply = await self._ask(ControlCall.STATUS, context)
        return reply

    async def bid_farewell(self, status: pb.StatusReply) -> None:
        """Answers Status with ``status`` from now on; returns after every watcher has received
        it.
        """
        self._last_status = status
        self._forget_watchers()
        if self._watchers:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_told.wait(), FAREWELL_S)

    def _forget_watchers(self) -> None:
        """Forgets watchers without a recent call."""
        since_s = time.monotonic() - WATCHED_S
        self._watchers = {p: at_s for p, at_s in self._watchers.items() if at_s > since_s}

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.ControlReply:
        reply: pb.ControlReply = await self._ask(ControlCall.PAUSE, context)
        return reply

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ControlReply:
        reply: pb.ControlReply = await self._ask(ControlCall.RESUME, context)
        return reply

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.ControlReply:
        reply: pb.ControlReply = await self._ask(ControlCall.STOP, context, _within(request))
        return reply

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotReply:
        reply: pb.SnapshotReply = await self._ask(ControlCall.SNAPSHOT, context)
        return reply

    async def Weights(self, request: pb.WeightsRequest, context: Context) -> pb.WeightsReply:
        directory = request.directory
        if not directory.startswith("/") or len(directory) > MAX_PATH or "\0" in directory:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"WeightsRequest.directory: expected an absolute path of at most {MAX_PATH}"
                f" characters, got {directory[:100]!r}",
            )
        reply: pb.WeightsReply = await self._ask(ControlCall.WEIGHTS, context, directory=directory)
        return reply

    async def _ask(
        self,
        call: ControlCall,
        context: Context,
        within_s: float | None = None,
        directory: str = "",
    ) -> Any:
        snapshot = call in _TIMEOUTS_S
        if len(self.calls) >= MAX_CALLS or (snapshot and self._num_snapshots >= MAX_SNAPSHOTS):
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"{MAX_SNAPSHOTS if snapshot else MAX_CALLS} such calls are waiting already",
            )
        self._num_snapshots += snapshot
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        future = self.calls[ticket] = asyncio.get_running_loop().create_future()
        own_s = _TIMEOUTS_S.get(call, CALL_TIMEOUT_S)
        left_s = context.time_remaining()
        timeout_s = own_s if left_s is None else min(own_s, left_s)
        self._events.put(
            ControlAsked(ticket=ticket, call=call, within_s=within_s, directory=directory)
        )
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"{call.value} took over {timeout_s:.1f} s"
            )
        except _Ending as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except _CallFailed as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            self.calls.pop(ticket, None)
            self._num_snapshots -= snapshot

    def answer(self, ticket: int, result: Any) -> None:
        """Answers a call, if its client still waits."""
        future = self.calls.get(ticket)
        if future is None or future.done():
            return
        if isinstance(result, _CallFailed):
            future.set_exception(result)
        else:
            future.set_result(result)


def _within(request: pb.StopRequest) -> float | None:
    """Returns the seconds that a stop may take, if the client says so."""
    given = request.within_seconds
    return given if 0.0 < given < math.inf else None


class _CallFailed(Exception):
    """The machine's error as the answer of a call."""


class _Ending(_CallFailed):
    """The end of the scheduler as the answer of a call."""


class SchedulerServer:
    """The listening server. All methods are for the machine's thread."""

    def __init__(
        self,
        events: EventQueue,
        host: str,
        port: int,
        homes: Mapping[str, str],
        admission: Admission,
        *,
        is_held: bool = False,
    ) -> None:
        """Listens for callers that ``admission`` accepts. ``homes``: nodes of members, by name.
        ``is_held``: this run's node keeps the port for this process
        (:class:`penstock.daemons.node.endpoint.OwnPort`).

        Raises:
            ConfigError: the port is not available.
        """
        # Without a hold a port in use is an error, not a load balancer.
        self._options = (("grpc.so_reuseport", int(is_held)), *_OPTIONS)
        self._streams_of: dict[str, int] = {}
        self._orders: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._events = events
        self._homes = homes
        self._admission = admission
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        listening: futures.Future[int] = futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(f"{host}:{port}", listening)),
            name="server",
            daemon=True,
        )
        self._thread.start()
        try:
            self.port = listening.result()
        except RuntimeError as error:
            self._thread.join()
            raise ConfigError(
                f"cluster.scheduler_port = {port}: cannot listen on {host}:{port}:"
                f" {describe_listener(f'{host}:{port}')}; choose another port, or 0 for any"
            ) from error

    async def _serve(self, address: str, listening: futures.Future[int]) -> None:
        """Serves on the event loop, from listening to :meth:`close`."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        pending = PendingConnections(max(MIN_PENDING, len(self._homes)))
        authorizer = CallAuthorizer(self._admission)
        self._servicer = _Servicer(self._events, pending, self._homes, authorizer)
        try:
            self._server = self._bound(pending, authorizer)
            listening.set_result(self._admission.listen(self._server, address))
        except BaseException as error:
            listening.set_exception(error)
            return
        await self._closing.wait()
        await self._health.enter_graceful_shutdown()
        self._servicer.finish()
        await self._server.stop(self._grace_s)

    def _bound(self, pending: PendingConnections, authorizer: CallAuthorizer) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=self._options,
            interceptors=[AuthInterceptor(pending, authorizer, frozenset((_JOIN,)))],
            maximum_concurrent_rpcs=MAX_WAITING + 2 * len(self._homes),
        )
        rpc.add_MembershipServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]  # generated
        rpc.add_ControlServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]  # generated
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    def start(self) -> None:
        """Starts to serve."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> None:
        await self._server.start()
        for name in ("", *_NAMES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def accept(self, stream: int, member: str) -> None:
        """Binds ``member`` to ``stream``, and sends a first heartbeat as the confirmation."""
        self._streams_of[member] = stream
        self._do(self._servicer.accept, stream)
        self._do(self._servicer.put, stream, _HEARTBEAT)

    def send(self, member: str, message: pb.SchedulerMessage) -> None:
        """Sends a message to a member; drops it if the member's stream has ended."""
        stream = self._streams_of.get(member)
        if stream is not None:
            self._do(self._servicer.put, stream, message)

    def beat(self) -> None:
        """Sends a heartbeat to every member, and cuts overdue streams."""
        self._do(self._servicer.beat, list(self._streams_of.values()))

    def refuse(self, stream: int, reason: str) -> None:
        """Sends Refused and ends the stream."""
        self._do(self._servicer.refuse, stream, reason)

    def disconnect(self, stream: int) -> None:
        """Ends a stream now."""
        self._do(self._servicer.disconnect, stream)

    def bid_farewell(self, status: pb.StatusReply) -> None:
        """Sends ``status``, the end of the run, to watchers; waits for a moment until they call."""
        farewell = self._servicer.bid_farewell(status)
        asyncio.run_coroutine_threadsafe(farewell, self._loop).result()

    def answer(self, effect: Reply | ReplyError) -> None:
        """Answers a control call."""
        result = effect.reply if isinstance(effect, Reply) else _CallFailed(effect.error)
        self._do(self._servicer.answer, effect.ticket, result)

    def close(self, grace_s: float = 1.0) -> None:
        """Writes all queues for at most ``grace_s`` seconds; ends streams, calls and threads."""
        self._grace_s = grace_s
        self._do(self._closing.set)
        self._thread.join()

    def _do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Runs an action on the event loop, in the order of these calls."""
        self._orders.append((action, arguments))
        if len(self._orders) == 1:  # otherwise the loop is awake, and takes this action, too
            self._loop.call_soon_threadsafe(self._obey)

    def _obey(self) -> None:
        # An action added after the last check of the deque is alone in it, and wakes the loop
        # again.
        while self._orders:
            action, arguments = self._orders.popleft()
            try:
                action(*arguments)
            except Exception:
                _log.exception("cannot carry out %s", action.__name__)


_HEARTBEAT = pb.SchedulerMessage(heartbeat=pb.Heartbeat())
