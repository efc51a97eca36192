"""A member's end of its stream to the scheduler: reconnects, sends heartbeats, queues messages.

What the messages mean is described in ``docs/INTERNALS.md``, "Members and the scheduler"; the
scheduler's end is :mod:`penstock.daemons.scheduler.service`.

Three threads at most: one connects and reads, one sends heartbeats and watches for silence, and
gRPC's own writes what :meth:`MemberLink.send` queued. All have ended when
:meth:`MemberLink.close` returns, except a reading thread for which gRPC does not end a stream
within :data:`HANG_S` of its cut. The link leaves such a thread behind and reads on another.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import grpc

from penstock.host import world
from penstock.host.errors import PenstockError, ProtocolError
from penstock.host.logs import recover_from
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.process import RunProcess
from penstock.protocol.security.credentials import Connection, Credentials, member_credentials

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 0.5
MAX_QUEUED = 65536
"""Messages waiting to be written; more means that the scheduler stopped reading long ago."""
_CUT_AGAIN_S = 0.05
HANG_S = 10.0
"""Time from the cut of a stream until its thread is left behind. gRPC usually ends a cancelled
call in milliseconds. Once, a call of grpcio 1.85.3 did not end within half an hour.
"""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.enable_http_proxy", 0),
    # Channels with equal arguments share one socket and its backoff otherwise; a new stream wants
    # a new socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The members and the clients retry, with a new Hello or the user's command.
    ("grpc.enable_retries", 0),
)

_log = logging.getLogger(__name__)

HelloFactory = Callable[[], pb.Hello]
Listener = Callable[[pb.SchedulerMessage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """Progress of a member's work, as its heartbeats report it.

    ``activity``: the current one, empty for none. ``waiting``: True if it waits for another member.
    ``progress``: a count that grows while the work advances. ``stuck``: True if a thread that other
    members depend on hangs. Then the process sends no heartbeats, so that it is replaced.
    """

    activity: str = ""
    waiting: bool = False
    progress: int = 0
    stuck: bool = False


IDLE = Doing()


class MemberLink:
    """One member's stream, kept open for as long as the process lives.

    ``hello`` is called for every new stream, so that it can report the current epoch. ``listener``
    is called on the reading thread with every message except heartbeats, before the message is
    queued for :meth:`receive`; it must not block. Messages of a stream that broke stay queued, in
    order, before those of the next stream. ``doing`` is called before every heartbeat, on the
    heartbeats' thread. ``Refused`` is delivered like any message: the process must then exit with
    :class:`~penstock.host.errors.RefusedError`. ``access`` connects each stream, because keys may
    be replaced while the process lives.
    """

    def __init__(
        self,
        *,
        address: str,
        access: Credentials,
        hello: HelloFactory,
        heartbeat_interval_s: float,
        silence_timeout_s: float,
        listener: Listener | None = None,
        doing: Callable[[], Doing] = lambda: IDLE,
    ) -> None:
        self.address = address
        self._access = access
        self._trouble = ""  # with the last stream, said once; of the connecting thread
        self._hello = hello
        self._nonce = world.random_bits(64)
        self._interval_s = heartbeat_interval_s
        self._silence_timeout_s = silence_timeout_s
        self._listener = listener
        self._doing = doing
        self._inbox: queue.SimpleQueue[pb.SchedulerMessage | None] = world.queue()
        self._lock = world.lock()  # of _stream and _heard_s; nothing waits while it is held
        self._stream: _SchedulerStream | None = None
        self._failure: Exception | None = None
        self._heard_s = world.monotonic()
        self._closing = world.event()
        self._readers = 0  # reading threads so far; only the last one's messages count
        self._reader = self._new_reader()
        self._beater = world.thread(target=self._beat, name="member-heartbeat", daemon=True)

    def _new_reader(self) -> threading.Thread:
        self._readers += 1
        target = partial(self._connect_and_read, self._readers)
        return world.thread(target=target, name="member-link", daemon=True)

    def start(self) -> None:
        """Starts to connect; returns immediately."""
        self._reader.start()
        self._beater.start()

    @property
    def connected(self) -> bool:
        """True if the scheduler has answered on the present stream."""
        with self._lock:
            return self._stream is not None and self._stream.answered

    @property
    def heard_s(self) -> float:
        """Time of the scheduler's last message on any stream (monotonic); initially the start of
        the link.
        """
        with self._lock:
            if self._stream is not None and self._stream.answered:
                self._heard_s = max(self._heard_s, self._stream.last_heard)
            return self._heard_s

    def send(self, message: pb.MemberMessage) -> None:
        """Queues a message; any thread may call this, and it never blocks.

        Without a stream the message is dropped. The scheduler has seen the stream end, so it starts
        a new epoch, in which messages of the old epoch mean nothing.
        """
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.put(message)

    def receive(self, timeout_s: float | None) -> pb.SchedulerMessage | None:
        """Returns the next message but heartbeats; None after ``timeout_s`` seconds or on close.

        Raises:
            ProtocolError: the link has ended because ``hello`` or ``listener`` raised.
        """
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            message = None
        if message is None and self._failure is not None:
            raise ProtocolError(
                f"link to the scheduler at {self.address} ended: {self._failure!r}"
            ) from self._failure
        return message

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes queued messages, ends the stream and all threads.

        Waits up to ``timeout_s`` for the scheduler to read the last messages, then cuts the stream.
        """
        self._closing.set()
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.finish()
        if self._beater.ident is not None:
            deadline = world.monotonic() + timeout_s
            for thread in (self._reader, self._beater):
                thread.join(timeout=max(0.0, deadline - world.monotonic()))
            self._cut_until_ended()
            self._beater.join()  # it waits for nothing but the next heartbeat
        self._inbox.put(None)

    def _cut_until_ended(self) -> None:
        """Cuts streams until the reading thread ends, including streams of a connection that was in
        progress.
        """
        while self._reader.is_alive():
            with self._lock:
                stream = self._stream
            if stream is not None:
                stream.cut()
                if stream.hangs:
                    _log.error(_HANGS, HANG_S)
                    return
            self._reader.join(timeout=_CUT_AGAIN_S)

    def _leave_behind(self, stream: _SchedulerStream) -> None:
        """Reads on a new thread, because gRPC does not end ``stream``."""
        with self._lock:
            if self._stream is not stream:
                return  # it has just ended
            self._stream = None
            self._reader = self._new_reader()
        _log.error(_HANGS, HANG_S)
        stream.finish()  # ends the thread that writes
        self._reader.start()

    def _connect_and_read(self, reader: int) -> None:
        backoff_s = FIRST_BACKOFF_S
        try:
            while not self._closing.is_set() and reader == self._readers:
                if self._run_stream(reader):
                    backoff_s = FIRST_BACKOFF_S
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        except Exception as error:
            _log.exception("link to the scheduler ended")
            self._failure = error
            self._inbox.put(None)

    def _run_stream(self, reader: int) -> bool:
        """Opens one stream and reads it to its end; returns whether the scheduler answered on
        it.
        """
        hello = self._hello()
        hello.nonce = self._nonce
        try:
            connection = self._access.connect(self.address, CHANNEL_OPTIONS)
            connection.check()
        except PenstockError as error:
            self._say_trouble(str(error))
            return False
        stream = _SchedulerStream(connection, hello)
        with self._lock:
            self._stream = stream
        if self._closing.is_set():  # close() may have run before this stream was stored
            stream.finish()
        try:
            for message in stream.messages():
                if reader != self._readers:
                    break  # left behind
                _follow_story(message)
                if self._listener is not None:
                    self._listener(message)
                self._inbox.put(message)
        finally:
            with self._lock:
                if self._stream is stream:
                    self._stream = None
            stream.release()
        if stream.answered:
            self._trouble = ""
            _log.info("stream to %s ended: %s", self.address, stream.end_reason)
        elif not self._closing.is_set():
            self._say_trouble(stream.end_reason)
        return stream.answered

    def _say_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            _log.warning("no stream to the scheduler at %s: %s", self.address, trouble)
        self._trouble = trouble

    def _beat(self) -> None:
        """Sends heartbeats. Cuts a stream if the scheduler has been silent for too long, or if this
        process listens on another address than the stream's Hello has.
        """
        sequence = 0
        stuck = False
        last_tick = world.monotonic()
        while not self._closing.wait(self._interval_s):
            now, previous, last_tick = world.monotonic(), last_tick, world.monotonic()
            with self._lock:
                stream = self._stream
            if stream is None:
                continue
            if stream.hangs:
                self._leave_behind(stream)
                continue
            if now - previous > max(self._silence_timeout_s / 2, 2 * self._interval_s):
                stream.heard()  # this process was stopped: what arrived meanwhile is still unread
            if now - stream.last_heard > self._silence_timeout_s:
                _log.warning("scheduler silent for %.1f s: reconnecting", now - stream.last_heard)
                stream.cut()
                continue
            if stream.answered and self._hello().data_endpoint != stream.data_endpoint:
                _log.warning("this process listens elsewhere now: reconnecting")
                stream.cut()
                continue
            doing = self._doing()
            if doing.stuck and not stuck:
                _log.error("a thread of this process stands still: heartbeats are not sent")
            stuck = doing.stuck
            if stuck:
                continue
            sequence += 1
            stream.put(pb.MemberMessage(heartbeat=_heartbeat(sequence, doing)))


_HANGS = (
    "gRPC has not ended a cancelled stream to the scheduler for %.0f s: its thread is left behind"
)
_ORDINARY = frozenset(("run_attempt", "evaluate"))


def _follow_story(message: pb.SchedulerMessage) -> None:
    """Assigns log records to the failure of a Drain until ordinary work continues."""
    kind = message.WhichOneof("body")
    if kind == "drain" and message.drain.cause:
        recover_from(message.drain.cause)
        _log.info("drained for membership %d", message.drain.epoch)
    elif kind == "fence":
        fence = message.fence
        extra = {"cause": fence.cause, "child_pid": fence.pid}
        _log.info("ordered to fence %s", fence.member, extra=extra)
    elif kind in _ORDINARY:
        recover_from("")


def _heartbeat(sequence: int, doing: Doing) -> pb.Heartbeat:
    return pb.Heartbeat(
        sequence=sequence,
        activity=doing.activity,
        waiting=doing.waiting,
        progress=doing.progress,
    )


def link_to_scheduler(
    process: RunProcess,
    node: str,
    scheduler: str,
    hello: HelloFactory,
    doing: Callable[[], Doing] = lambda: IDLE,
    listener: Listener | None = None,
) -> MemberLink:
    """Returns the link of a process of ``node`` to ``scheduler`` (HOST:PORT), not yet started.

    The run's configuration gives access and intervals.
    """
    cluster = process.config.cluster
    return MemberLink(
        address=scheduler,
        access=member_credentials(process.config, process.run.path, node),
        hello=hello,
        heartbeat_interval_s=cluster.heartbeat_interval_s,
        silence_timeout_s=cluster.heartbeat_timeout_s,
        listener=listener,
        doing=doing,
    )


class _SchedulerStream:
    """One connection and its call, from Hello to the end."""

    def __init__(self, connection: Connection, hello: pb.Hello) -> None:
        self.answered = False
        self.data_endpoint = hello.data_endpoint
        self.last_heard = world.monotonic()
        self.end_reason = "closed by the scheduler"
        self._cut_s: float | None = None
        self._outgoing: queue.SimpleQueue[pb.MemberMessage | None] = world.queue()
        self._outgoing.put(pb.MemberMessage(hello=hello))
        self._writer: threading.Thread | None = None
        self._connection = connection
        self._call = connection.join(self._requests())

    def put(self, message: pb.MemberMessage) -> None:
        if self._outgoing.qsize() >= MAX_QUEUED:
            _log.warning("%d messages unsent: reconnecting", MAX_QUEUED)
            self.cut()
        else:
            self._outgoing.put(message)

    def heard(self) -> None:
        self.last_heard = world.monotonic()

    def messages(self) -> Iterator[pb.SchedulerMessage]:
        """Yields all messages except heartbeats, until the stream ends for any reason."""
        try:
            for message in self._call:
                self.heard()
                self.answered = True
                if not message.HasField("heartbeat"):
                    yield message
        except grpc.RpcError as error:
            known = isinstance(error, grpc.Call)
            self.end_reason = f"{error.code()}: {error.details()}" if known else repr(error)

    def finish(self) -> None:
        """Ends the messages of this side; the scheduler then ends the stream."""
        self._outgoing.put(None)

    def cut(self) -> None:
        """Ends the stream immediately, with messages unsent."""
        if self._cut_s is None:
            self._cut_s = world.monotonic()
        self._call.cancel()

    @property
    def hangs(self) -> bool:
        """True if the stream was cut long ago; gRPC should have ended it."""
        return self._cut_s is not None and world.monotonic() - self._cut_s > HANG_S

    def release(self) -> None:
        """Frees the channel and waits for gRPC's writing thread, which waits in
        :meth:`_requests`.
        """
        self._call.cancel()
        self.finish()
        self._connection.close()
        if self._writer is not None:
            self._writer.join(timeout=5.0)

    def _requests(self) -> Iterator[pb.MemberMessage]:
        self._writer = world.current_thread()
        while (message := self._outgoing.get()) is not None:
            yield message
