"""What reaches the machine's thread, and how much of it may wait there.

Whatever members and strangers send is bounded here: the size of texts, the number of streams that
have not said who they are, and the messages of a stream that the machine has not taken yet. A
reader that is ahead waits, gRPC's flow control then makes its peer wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from penstock.daemons.scheduler.machine.events import Event
from penstock.protocol.generated import scheduler_pb2 as pb

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
