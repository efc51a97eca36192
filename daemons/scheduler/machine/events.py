"""Events and effects of the scheduler's machine: values without behaviour.

Events and effects that other daemons share are in :mod:`penstock.daemons.kit.events`.

Effects are carried out in the order of the list. Journal effects are durable before the next
effect happens: that is what makes a commit safe to announce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from penstock.daemons.kit.events import EffectFailed, Exit, LogLine, StopAsked, Tick
from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.daemons.scheduler.machine.position import Position
from penstock.host.errors import ExitCode
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord

# ---- events ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A new stream said Hello. Streams are numbered by the service, never twice."""

    stream: int
    hello: pb.Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A later message of a stream."""

    stream: int
    message: pb.MemberMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """A stream ended, by either side."""

    stream: int


class ControlCall(Enum):
    """Control calls."""

    STATUS = "status"
    PAUSE = "pause"
    RESUME = "resume"
    SNAPSHOT = "snapshot"
    WEIGHTS = "weights"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAsked:
    """A control client called; it is answered by :class:`Reply` or :class:`ReplyError`.

    ``within_s``: seconds that a stop may take; None for no limit. ``directory``: folder for a copy
    of the weights.
    """

    ticket: int
    call: ControlCall
    within_s: float | None = None
    directory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePrepared:
    """A :class:`PrepareSave` is done; without an error, the directory is there."""

    number: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFinished:
    """A :class:`CompleteSave` is done; without an error, the saved state is durable."""

    number: int
    version: int
    directory: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFound:
    """A :class:`FindSaved` is done; without an error, an older saved state exists."""

    saved: SavedState | None
    error: str = ""


Event = (
    Joined
    | Received
    | StreamClosed
    | Tick
    | ControlAsked
    | StopAsked
    | SavePrepared
    | SaveFinished
    | SavedFound
    | EffectFailed
)

# ---- effects ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Binds ``member`` to ``stream``: messages for the member go there."""

    stream: int
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuses a stream: its process must exit."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """Ends a stream: its process is not accepted any more."""

    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Queue a message for a member."""

    member: str
    message: pb.SchedulerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Send a heartbeat on every stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A complete saved state on disk."""

    version: int
    directory: str
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEpoch:
    """Durable before any message of the epoch: its number is never used again.

    ``next_attempt``: no attempt of an earlier epoch has this number or a higher one. ``pids``: the
    processes that may know the epoch.
    """

    epoch: int
    next_attempt: int
    pids: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalDecision:
    """Durable before the decision is announced. ``record.version`` is the version after it.

    ``metrics_json`` is the attempt's line for ``metrics.jsonl``, empty for a RESTORE.
    """

    epoch: int
    record: CommitRecord
    position: Position
    metrics_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalGenerations:
    """Durable before memory is filled from a partner. Older memory of these memoryds (by name), of
    the same ``incarnation``, is never accepted again.
    """

    epoch: int
    incarnation: int
    generations: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalTokens:
    """Durable before memory or a replica is filled or used: the tokens (hexadecimal) of members'
    segments. No segment with another token is accepted in this ``incarnation``.
    """

    incarnation: int
    tokens: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalNumerics:
    """Durable before a worker begins: the numerics recipe with ``digest`` holds from ``step`` on.
    ``recipe``: its canonical JSON. ``devices``: each worker's facts about its device.
    """

    step: int
    digest: str
    recipe: str
    devices: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEvaluation:
    """The evaluation of a set at a version is done; ``metrics_json`` as above."""

    evaluation: int
    score: Score
    metrics_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendMetrics:
    """Append a line that the journal has to ``metrics.jsonl``."""

    metrics_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSave:
    """Make the temporary directory, without stale files; then :class:`SavePrepared`."""

    number: int
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteSave:
    """Write the manifest, rename the directory, prune older states; then :class:`SaveFinished`.

    ``files`` and ``base``: name, bytes and SHA-256 of the state's own files, and of the run's files
    with frozen tensors. ``ranking``: evaluated versions from the best to the worst. The best saved
    one of them stays.
    """

    number: int
    version: int
    directory: str
    files: tuple[tuple[str, int, str], ...]
    position: Position
    attempt: int
    ranking: tuple[int, ...] = ()
    base: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FindSaved:
    """Find the newest intact saved state older than ``below``; then :class:`SavedFound`."""

    below: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer a control call."""

    ticket: int
    reply: pb.StatusReply | pb.ControlReply | pb.SnapshotReply | pb.WeightsReply


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyError:
    """Answer a control call with an error."""

    ticket: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEnd:
    """Write the run's result, for members that start after the scheduler has exited."""

    reason: str
    code: ExitCode
    keep_memory: bool
    failed: bool


Effect = (
    Accept
    | Refuse
    | Disconnect
    | Send
    | Beat
    | JournalEpoch
    | JournalDecision
    | JournalEvaluation
    | JournalGenerations
    | JournalTokens
    | JournalNumerics
    | AppendMetrics
    | PrepareSave
    | CompleteSave
    | FindSaved
    | Reply
    | ReplyError
    | LogLine
    | NoteEnd
    | Exit
)

# ---- values of the flight record ----

LONG_MESSAGE_BYTES = 512


def is_routine(event: Event) -> bool:
    """Returns whether an event without effects is not worth a record: a tick or a heartbeat."""
    if isinstance(event, Received):
        return bool(event.message.HasField("heartbeat"))
    return isinstance(event, Tick)


def abridged(value: Event | Effect) -> object:
    """Returns the value that the flight record keeps. Long messages are replaced by their size, so
    that thousands of records take little memory.
    """
    match value:
        case Send(member=member, message=message) if message.ByteSize() > LONG_MESSAGE_BYTES:
            return f"Send(member={member!r}, {_size(message)})"
        case Joined(stream=stream, hello=hello) if hello.ByteSize() > LONG_MESSAGE_BYTES:
            return f"Joined(stream={stream}, {hello.member!r}, Hello of {hello.ByteSize()} bytes)"
        case Received(stream=stream, message=message) if message.ByteSize() > LONG_MESSAGE_BYTES:
            return f"Received(stream={stream}, {_size(message)})"
        case Reply(ticket=ticket, reply=reply) if reply.ByteSize() > LONG_MESSAGE_BYTES:
            return f"Reply(ticket={ticket}, {type(reply).__name__} of {reply.ByteSize()} bytes)"
    return value


def _size(message: pb.MemberMessage | pb.SchedulerMessage) -> str:
    return f"{message.WhichOneof('body')} of {message.ByteSize()} bytes"
