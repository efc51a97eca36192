"""Conversions: the scheduler's messages to events, effects and commit records to messages."""

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
"""Constructors of events, by the kind of a message that most members receive."""


def event_of(message: pb.SchedulerMessage, events: Mapping[str, Callable[[Any], E]]) -> E | None:
    """Returns the event of a message by the table of a member; None if the table lacks its kind."""
    kind = message.WhichOneof("body") or ""
    build = events.get(kind)
    return None if build is None else build(getattr(message, kind))


def answer(
    effect: SendDrained | SendReady | SendFailed, memory: pb.MemoryState | None = None
) -> pb.MemberMessage:
    """Returns the message of an effect. Drained reports the content of the node's ``memory``."""
    if isinstance(effect, SendDrained):
        return pb.MemberMessage(drained=pb.Drained(epoch=effect.epoch, memory=memory))
    if isinstance(effect, SendReady):
        return pb.MemberMessage(ready=pb.Ready(epoch=effect.epoch))
    failed = pb.Failed(error=effect.error, exit_code=effect.code, epoch=effect.epoch)
    return pb.MemberMessage(failed=failed)


def record_message(record: CommitRecord) -> pb.Record:
    """Returns a commit record as a message."""
    fields: dict[str, Any] = dict(zip(RECORD_FIELDS, record.values, strict=True))
    return pb.Record(**fields)


def record_of(message: pb.Record) -> CommitRecord:
    """Returns the commit record that a message carries.

    Raises:
        ProtocolError: the decision is unknown.
    """
    try:
        return CommitRecord.of(getattr(message, name) for name in RECORD_FIELDS)
    except ValueError as error:
        raise ProtocolError(f"a commit record: {error}") from error
