"""The scheduler's gRPC server: streams of members and control calls become events in one queue.

Threads: each stream has one that reads (its own) and one that writes (of gRPC's pool). Whatever the
other end does, the thread that runs the machine only ever puts messages into queues: a member that
stops reading fills its own queue, and then loses its stream. What comes in is bounded, too
(:mod:`penstock.daemons.scheduler.intake`).
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.daemons.scheduler.intake import (
    Doorkeeper,
    EventQueue,
    Strangers,
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
from penstock.protocol.errors import ConfigError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.run.logs import Complaints

MAX_QUEUED = 4096
"""Messages that wait to be written to one member."""
MIN_STRANGERS = 16
"""Streams that are no member's (yet), and calls without a message, at a time; where there are more
members, as many as those. A member says Hello with its stream's first bytes, and comes again if it
was cut.
"""
LAST_WORDS_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 5.0
SNAPSHOT_TIMEOUT_S = 3600.0
MAX_CALLS = 16
MAX_SNAPSHOTS = 4
"""Snapshot calls, which may wait for long, leave room for the others."""
MAX_MESSAGE_BYTES = 2**20
"""The longest message of a member is Saved, with about a hundred bytes a block."""
MAX_WAITING = 1024
"""Calls and streams in all, those included that wait for a thread; more are turned away."""

_NAMES = ("penstock.v1.Membership", "penstock.v1.Control")
_JOIN = "/penstock.v1.Membership/Join"
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a load balancer
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 32),  # of one connection
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 60000),  # without a stream or call
)
_log = logging.getLogger(__name__)


class _MemberStream:
    """The server's end of one member's stream. ``due_s``: when it is cut; None while it may go on.
    ``stranger``: its number among those until the machine has accepted it.
    """

    def __init__(self, number: int, context: grpc.ServicerContext) -> None:
        self.number = number
        self.due_s: float | None = None
        self.stranger = 0
        self.room = StreamCredit()
        self._context = context
        self._outgoing: queue.Queue[pb.SchedulerMessage | None] = queue.Queue(MAX_QUEUED)

    def put(self, message: pb.SchedulerMessage) -> None:
        try:
            self._outgoing.put_nowait(message)
        except queue.Full:
            _log.warning("stream %d: %d messages unread: cut", self.number, MAX_QUEUED)
            self.cut()

    def is_open(self) -> bool:
        return bool(self._context.is_active())

    def finish(self) -> None:
        """End after what is queued is written, or soon in any case."""
        self.due_s = time.monotonic() + LAST_WORDS_TIMEOUT_S
        try:
            self._outgoing.put_nowait(None)
        except queue.Full:
            self.cut()

    def cut(self) -> None:
        self._context.cancel()  # type: ignore[no-untyped-call]  # missing in the stubs
        self.wake()

    def wake(self) -> None:
        """Let the writing thread see that the stream has ended."""
        try:
            self._outgoing.put_nowait(None)
        except queue.Full:
            _log.debug("stream %d: its writer is awake", self.number)

    def messages(self) -> Iterator[pb.SchedulerMessage]:
        while (message := self._outgoing.get()) is not None:
            yield message


class _Servicer(rpc.MembershipServicer, rpc.ControlServicer):
    """Turns calls into events."""

    def __init__(self, events: EventQueue, strangers: Strangers) -> None:
        self._events = events
        self._strangers = strangers
        self._complaints = Complaints(_log)
        self._num_snapshots = 0
        # Of streams, calls, readers and their numbers. Nothing waits while it is held, and
        # nothing of gRPC is called: the machine's thread takes it, too.
        self._lock = threading.Lock()
        self._next_stream = self._next_ticket = 1
        self._readers: set[threading.Thread] = set()
        self.streams: dict[int, _MemberStream] = {}
        self.calls: dict[int, futures.Future[Any]] = {}

    # ---- members ----

    def Join(
        self, request_iterator: Iterator[pb.MemberMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.SchedulerMessage]:
        with self._lock:
            stream = _MemberStream(self._next_stream, context)
            self._next_stream += 1
            self.streams[stream.number] = stream
            reader = threading.Thread(
                target=self._read,
                args=(stream, request_iterator),
                name=f"stream-{stream.number}",
                daemon=True,
            )
            self._readers.add(reader)
        stream.stranger = self._strangers.enter(stream.cut)
        reader.start()
        # Not cancelled when the messages end: that could overtake the last of them.
        yield from stream.messages()

    def _read(self, stream: _MemberStream, requests: Iterator[pb.MemberMessage]) -> None:
        try:
            self._read_until_end(stream, requests)
        except grpc.RpcError:
            _log.debug("stream %d broke", stream.number)
        except Exception as error:
            # gRPC raises a bare Exception when the call ends under a waiting iterator.
            _log.debug("stream %d broke: %r", stream.number, error)
        finally:
            self._events.put(StreamClosed(stream=stream.number))
            stream.wake()
            with self._lock:
                del self.streams[stream.number]
                self._readers.discard(threading.current_thread())
            self._strangers.leave(stream.stranger)

    def _read_until_end(self, stream: _MemberStream, requests: Iterator[pb.MemberMessage]) -> None:
        first = next(requests, None)
        if first is None or not first.HasField("hello"):
            self._complaints.say(f"stream {stream.number}: no Hello: cut")
            stream.cut()
            return
        odd = malformed(first.hello)
        if odd:
            self._complaints.say(f"stream {stream.number}: {odd}: cut")
            stream.cut()
            return
        self._events.put(Joined(stream=stream.number, hello=first.hello))
        for message in requests:
            if not stream.room.take(stream.is_open):
                return
            received = Received(stream=stream.number, message=cut_short(message))
            self._events.put(received, stream.room)

    def accept(self, number: int) -> None:
        """The stream is a member's."""
        with self._lock:
            stream = self.streams.get(number)
        if stream is not None:
            self._strangers.leave(stream.stranger)

    def expire(self, now_s: float) -> None:
        """Cut streams that are overdue: of strangers, or with unread last words."""
        self._strangers.expire(now_s)
        with self._lock:
            streams = list(self.streams.values())
        for stream in streams:
            if stream.due_s is not None and stream.due_s < now_s:
                stream.due_s = None
                stream.cut()

    def join_readers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.join(timeout=max(0.0, deadline - time.monotonic()))

    # ---- control ----

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        reply: pb.StatusReply = self._ask(ControlCall.STATUS, context)
        return reply

    def Pause(self, request: pb.PauseRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        reply: pb.ControlReply = self._ask(ControlCall.PAUSE, context)
        return reply

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        reply: pb.ControlReply = self._ask(ControlCall.RESUME, context)
        return reply

    def Stop(self, request: pb.StopRequest, context: grpc.ServicerContext) -> pb.ControlReply:
        reply: pb.ControlReply = self._ask(ControlCall.STOP, context, _within(request))
        return reply

    def Snapshot(
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> pb.SnapshotReply:
        reply: pb.SnapshotReply = self._ask(ControlCall.SNAPSHOT, context)
        return reply

    def _ask(
        self, call: ControlCall, context: grpc.ServicerContext, within_s: float | None = None
    ) -> Any:
        snapshot = call is ControlCall.SNAPSHOT
        with self._lock:
            full = len(self.calls) >= MAX_CALLS or (
                snapshot and self._num_snapshots >= MAX_SNAPSHOTS
            )
            if not full:
                self._num_snapshots += snapshot
                ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
                future = self.calls[ticket] = futures.Future()
        if full:
            context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"{MAX_SNAPSHOTS if snapshot else MAX_CALLS} such calls are waiting already",
            )
        own_s = SNAPSHOT_TIMEOUT_S if snapshot else CALL_TIMEOUT_S
        left_s = context.time_remaining()
        timeout_s = own_s if left_s is None else min(own_s, left_s)
        context.add_callback(lambda: _forget(future))  # the client went away
        self._events.put(ControlAsked(ticket=ticket, call=call, within_s=within_s))
        try:
            return future.result(timeout=timeout_s)
        except (TimeoutError, futures.CancelledError):
            context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"{call.value} took over {timeout_s:.1f} s"
            )
        except _Ending as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except _CallFailed as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            with self._lock:
                self.calls.pop(ticket, None)
                self._num_snapshots -= snapshot

    def answer(self, ticket: int, result: Any) -> None:
        with self._lock:
            future = self.calls.get(ticket)
        if future is None or future.done() or not future.set_running_or_notify_cancel():
            return
        if isinstance(result, _CallFailed):
            future.set_exception(result)
        else:
            future.set_result(result)


def _within(request: pb.StopRequest) -> float | None:
    """Returns the seconds that a stop may take, if the client says so."""
    given = request.within_seconds
    return given if 0.0 < given < math.inf else None


def _forget(future: futures.Future[Any]) -> None:
    future.cancel()


class _CallFailed(Exception):
    """The machine answered a call with an error."""


class _Ending(_CallFailed):
    """There is no machine any more to answer a call."""


class SchedulerServer:
    """The listening server. All methods are for the machine's thread."""

    def __init__(self, events: EventQueue, host: str, port: int, num_members: int) -> None:
        """Listen.

        Raises:
            ConfigError: the port cannot be had.
        """
        max_strangers = max(MIN_STRANGERS, num_members)
        strangers = Strangers(max_strangers)
        self._servicer = _Servicer(events, strangers)
        self._streams_of: dict[str, int] = {}
        # Each stream has a thread while it lasts: of a member's old and new process, of strangers
        # and those that are being cut; the rest is for calls, which so never wait for streams.
        threads = 2 * num_members + 2 * max_strangers + MAX_CALLS + 8
        self._pool = futures.ThreadPoolExecutor(threads, "grpc")
        self._server = grpc.server(
            self._pool,
            options=_OPTIONS,
            interceptors=[Doorkeeper(strangers, frozenset((_JOIN,)))],
            maximum_concurrent_rpcs=MAX_WAITING,
        )
        rpc.add_MembershipServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]  # generated
        rpc.add_ControlServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]  # generated
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            self._pool.shutdown()
            raise ConfigError(
                f"cluster.scheduler_port = {port}: cannot listen on {host}:{port}; is another run"
                " using it? choose another port, or 0 for any"
            ) from error

    def start(self) -> None:
        """Serve."""
        self._server.start()
        for name in ("", *_NAMES):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def accept(self, stream: int, member: str) -> None:
        """From now on ``member`` is on ``stream``; a first heartbeat says that it is heard."""
        self._streams_of[member] = stream
        self._servicer.accept(stream)
        self._put(stream, _HEARTBEAT)

    def send(self, member: str, message: pb.SchedulerMessage) -> None:
        """Queue a message; it is dropped when the member's stream has ended."""
        stream = self._streams_of.get(member)
        if stream is not None:
            self._put(stream, message)

    def beat(self) -> None:
        """Queue a heartbeat for everyone, and clean up streams that are overdue."""
        for stream in self._streams_of.values():
            self._put(stream, _HEARTBEAT)
        self._servicer.expire(time.monotonic())

    def refuse(self, stream: int, reason: str) -> None:
        """Say so and end the stream."""
        self._put(stream, pb.SchedulerMessage(refused=pb.Refused(reason=reason)))
        found = self._servicer.streams.get(stream)
        if found is not None:
            found.finish()

    def disconnect(self, stream: int) -> None:
        """End a stream now."""
        found = self._servicer.streams.get(stream)
        if found is not None:
            found.cut()

    def answer(self, effect: Reply | ReplyError) -> None:
        """Answer a control call."""
        result = effect.reply if isinstance(effect, Reply) else _CallFailed(effect.error)
        self._servicer.answer(effect.ticket, result)

    def close(self, grace_s: float = 1.0) -> None:
        """Write what is queued, for at most ``grace_s``; end all streams, calls and threads."""
        self._health.enter_graceful_shutdown()
        for ticket in list(self._servicer.calls):
            self._servicer.answer(ticket, _Ending("the scheduler ends"))
        for stream in list(self._servicer.streams.values()):
            stream.finish()
        self._server.stop(grace_s).wait()
        self._servicer.join_readers(timeout_s=5.0)
        self._pool.shutdown()

    def _put(self, stream: int, message: pb.SchedulerMessage) -> None:
        found = self._servicer.streams.get(stream)
        if found is not None:
            found.put(message)


_HEARTBEAT = pb.SchedulerMessage(heartbeat=pb.Heartbeat())
