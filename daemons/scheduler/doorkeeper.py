"""Keeps calls and streams of strangers from taking the server's threads.

gRPC gives every call a thread as soon as its headers are there, and waits in it for the first
message, for as long as the caller likes. So everybody who has not said yet what he wants is a
stranger here: strangers are few at a time, for a short time, and beyond that the oldest goes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from penstock.protocol.run.logs import Complaints

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
