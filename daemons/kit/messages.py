"""The scheduler's messages as events, effects as messages, and a commit record as it travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from penstock.daemons.kit.events import (
    BeginAsked,
    DrainAsked,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
)
from penstock.host.errors import ProtocolError, ending_code
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import RECORD_FIELDS, CommitRecord

E = TypeVar("E")

COMMON_EVENTS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "drain": lambda m: DrainAsked(epoch=m.epoch, saving=m.saving),
        "begin": lambda m: BeginAsked(epoch=m.epoch),
        "shutdown": lambda m: ShutdownAsked(
            reason=m.reason, code=ending_code(m.exit_code), keep_memory=m.keep_memory
        ),
        "refused": lambda m: RefusedByScheduler(reason=m.reason),
    }
)
"""Kind of a message that most members hear -> its event."""


def event_of(message: pb.SchedulerMessage, events: Mapping[str, Callable[[Any], E]]) -> E | None:
    """Returns the event that a message is by the table of the member, None if it is for others."""
    kind = message.WhichOneof("body") or ""
    build = events.get(kind)
    return None if build is None else build(getattr(message, kind))


def answer(
    effect: SendDrained | SendReady | SendFailed, memory: pb.MemoryState | None = None
) -> pb.MemberMessage:
    """Returns the message that an effect sends; a Drained says what is in the node's ``memory``."""
    if isinstance(effect, SendDrained):
        return pb.MemberMessage(drained=pb.Drained(epoch=effect.epoch, memory=memory))
    if isinstance(effect, SendReady):
        return pb.MemberMessage(ready=pb.Ready(epoch=effect.epoch))
    failed = pb.Failed(error=effect.error, exit_code=effect.code, epoch=effect.epoch)
    return pb.MemberMessage(failed=failed)


def record_message(record: CommitRecord) -> pb.Record:
    """Returns a commit record as it travels."""
    fields: dict[str, Any] = dict(zip(RECORD_FIELDS, record.values, strict=True))
    return pb.Record(**fields)


def record_of(message: pb.Record) -> CommitRecord:
    """Returns the commit record that a message carries.

    Raises:
        ProtocolError: its decision is none.
    """
    try:
        return CommitRecord.of(getattr(message, name) for name in RECORD_FIELDS)
    except ValueError as error:
        raise ProtocolError(f"a commit record: {error}") from error
