"""What reaches the machine's thread, and how much of what others send may wait.

Whatever members send is bounded: the size of texts, and the messages of a stream that the machine
has not taken yet. A reader that is ahead waits, and gRPC's flow control then makes its peer wait.

gRPC gives every call a thread as soon as its headers are there, and waits in it for the first
message, for as long as the caller likes. So everybody who has not said yet what he wants is a
stranger here: strangers are few at a time, for a short time, and beyond that the oldest goes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from penstock.daemons.scheduler.machine.events import Event
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.logs import Complaints

MAX_UNREAD = 16
"""Messages of one stream that wait for the machine."""
MAX_NAME = 128
"""Characters of a name or address."""
MAX_TEXT = 16384
"""Characters of an error that is shown to the user."""
_LOOK_S = 0.5


class StreamCredit:
    """How many more messages of one stream may wait."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(MAX_UNREAD)

    def take(self, wanted: Callable[[], bool]) -> bool:
        """Wait for room as long as ``wanted()``; whether there was some."""
        while not self._free.acquire(timeout=_LOOK_S):
            if not wanted():
                return False
        return True

    def give_back(self) -> None:
        """A message has been taken."""
        self._free.release()


class EventQueue:
    """The queue before the machine. ``put`` may be called by any thread, and by signal handlers."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Event, StreamCredit | None]] = queue.SimpleQueue()

    def put(self, event: Event, room: StreamCredit | None = None) -> None:
        """Queue an event; ``room`` is given back when it is taken."""
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
    texts = {
        "run_id": hello.run_id,
        "member": hello.member,
        "data_endpoint": hello.data_endpoint,
    }
    for name, text in texts.items():
        if len(text) > MAX_NAME or not text.isprintable():
            return f"Hello.{name}: {len(text)} characters, at most {MAX_NAME} printable ones"
    return ""


def cut_short(message: pb.MemberMessage) -> pb.MemberMessage:
    """Returns a message whose free texts have a length that can be logged and shown."""
    kind = message.WhichOneof("body")
    name, limit = _TEXTS.get(kind or "", ("", 0))
    if name:
        body = getattr(message, str(kind))
        text = getattr(body, name)
        if len(text) > limit:
            setattr(body, name, text[:limit] + "…")
    return message


_TEXTS = {
    "heartbeat": ("activity", 4 * MAX_NAME),
    "failed": ("error", MAX_TEXT),
    "saved": ("error", MAX_TEXT),
    "fenced": ("member", MAX_NAME),
}
"""Kind of message -> its field with a free text, and how long that may be."""


if TYPE_CHECKING:
    _Interceptor = grpc.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.ServerInterceptor

PATIENCE_S = 3.0
"""How long anybody may be a stranger."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stranger:
    cut: Callable[[], Any]
    due_s: float


class Strangers:
    """Who is there and has not said what he wants; any thread may call."""

    def __init__(self, limit: int) -> None:
        """At most ``limit`` are borne at a time."""
        self._limit = limit
        self._lock = threading.Lock()  # decides who goes; they are cut after it is released
        self._next = 1
        self._present: dict[int, _Stranger] = {}  # in the order in which they came
        self._complaints = Complaints(_log)

    def enter(self, cut: Callable[[], Any]) -> int:
        """Somebody came, whom ``cut`` sends away. A number for :meth:`leave`."""
        stranger = _Stranger(cut=cut, due_s=time.monotonic() + PATIENCE_S)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._present[number] = stranger
            oldest = list(self._present)[: -self._limit]
            surplus = [self._present.pop(number) for number in oldest]
        self._send_away(surplus, f"over {self._limit} calls and streams of strangers")
        return number

    def leave(self, number: int) -> None:
        """He is none any more, or has gone."""
        with self._lock:
            self._present.pop(number, None)

    def expire(self, now_s: float) -> None:
        """Send away who has been here for too long."""
        with self._lock:
            late = [number for number, s in self._present.items() if s.due_s < now_s]
            overdue = [self._present.pop(number) for number in late]
        self._send_away(overdue, f"nothing said for {PATIENCE_S:g} s")

    def _send_away(self, strangers: list[_Stranger], reason: str) -> None:
        for stranger in strangers:
            stranger.cut()
        if strangers:
            self._complaints.say(f"{len(strangers)} calls or streams cut: {reason}")


class Doorkeeper(_Interceptor):
    """Lets calls in: their handlers start with the message there.

    ``own``: methods that deal with strangers themselves. Streams of answers to one message
    (``Watch`` of the health service) are not served: each would be there for ever.
    """

    def __init__(self, strangers: Strangers, own: frozenset[str]) -> None:
        self._strangers = strangers
        self._own = own

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Returns the handler of a method, with the wait for the message in ours."""
        handler = continuation(details)
        if handler is None or details.method in self._own:
            return handler
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._bounded(handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.request_streaming or handler.response_streaming:
            return None
        return grpc.stream_unary_rpc_method_handler(
            self._awaited(handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _awaited(self, call: Callable[[Any, Any], Any]) -> Callable[[Iterator[Any], Any], Any]:
        def handle(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            number = self._strangers.enter(context.cancel)
            try:
                request = next(requests, None)
            except Exception as error:
                # gRPC raises a bare Exception when the call ends under a waiting iterator.
                _log.debug("a call ended before its message: %r", error)
                request = None
            finally:
                self._strangers.leave(number)
            if request is None:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
            return call(request, context)

        return handle

    def _bounded(self, call: Callable[[Any, Any], Any]) -> Callable[[Iterator[Any], Any], Any]:
        """Returns a handler of a conversation that has to be over in the time of a stranger."""

        def handle(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            number = self._strangers.enter(context.cancel)
            try:
                yield from call(requests, context)
            except Exception as error:
                _log.debug("a conversation was cut: %r", error)
            finally:
                self._strangers.leave(number)

        return handle
