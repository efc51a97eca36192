"""Data-plane messages: one msgpack header frame, then raw buffers, over ZeroMQ. Never pickle.

Every header is one frozen dataclass below; the first element on the wire is its name. Decoding
checks sizes and types and raises :class:`~penstock.host.errors.ProtocolError` for anything
else, so arbitrary bytes never crash a daemon. Which socket carries what: ``docs/INTERNALS.md``.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import msgpack

from penstock.host.errors import ProtocolError
from penstock.shm.layout import ArrayKey

MAX_HEADER_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20
"""Raw buffers of block ranges travel in frames of at most this size: the fastest for ZeroMQ over
TCP.
"""
ENCRYPTED_CHUNK_BYTES = 1 << 18
"""The same where frames are encrypted, which copies them a few times: they stay in caches."""
MAX_RANGE_BYTES = 2 * CHUNK_BYTES
"""Largest range of one :class:`BlockRequest`. A receiver gets nothing of a range before all of it
is there, so small ones let receiving and copying overlap, in caches.
"""

TransferKind = Literal["activation", "gradient", "checkpoint", "reduction", "entry"]
"""Kinds of transfers between workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One named tensor: its raw bytes are the frame at the same position after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Tensors from worker to worker; one raw frame per tensor follows.

    ``kind`` with ``stage`` and ``micro_batch`` as in :mod:`penstock.protocol.plan.instructions`. A
    ``reduction`` has the gradient sums of backward stage ``stage`` (``micro_batch`` 0). With an
    ``entry`` the emulated device ``micro_batch`` enters the collective with number ``stage``.
    ``attempt`` is the attempt, or the evaluation's number when ``phase`` is ``eval``.
    """

    run_id: str
    epoch: int
    phase: Literal["train", "eval"]
    attempt: int
    kind: TransferKind
    stage: int
    micro_batch: int
    tensors: tuple[TensorHeader, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAddress:
    """Worker to worker at Begin: the store of the epoch's process group listens on ``port`` of the
    sender's host.
    """

    run_id: str
    epoch: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferShape:
    """Worker to worker: the shape of each transfer of this kind, phase and stage from ``sender`` in
    this epoch, for bytes in a process group.
    """

    run_id: str
    epoch: int
    sender: int
    phase: Literal["train", "eval"]
    kind: TransferKind
    stage: int
    tensors: tuple[TensorHeader, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReady:
    """Worker to optimizerd of its node: a contribution is complete and its ready word set."""

    run_id: str
    epoch: int
    attempt: int
    block: int
    contribution: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdated:
    """Worker to optimizerd of its node: UPDATE has written a block's weights of ``version``.

    ``finite`` and ``sum_squares`` are of the summed gradients, as in
    :class:`penstock.protocol.plan.step.SweepStatus`; ``seconds``: how long the preview took.
    """

    run_id: str
    epoch: int
    attempt: int
    block: int
    version: int
    finite: bool
    sum_squares: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Any process to the memoryd of its node: tell me the segments, I am going to map them."""

    run_id: str
    member: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """``segments``: (name, bytes). A non-empty ``error`` means refused, with the reason."""

    segments: tuple[tuple[str, int], ...]
    digest: bytes
    undo_bytes: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """Requests bytes ``[offset, offset + num_bytes)`` of an array of a block from a memoryd.

    ``array`` is one of:

    * ``weights`` at ``version``; answered only when complete and committed.

    * ``frozen``; answered once there is a model in memory.

    * ``grads``: contribution ``contribution`` of copy ``version % 2``. Answered only when its ready
      word has (epoch, attempt) or later: a committed copy stays unchanged while the next attempt
      fills the other.

    * ``state``: the array ``name`` of a block's state; ``low`` and ``high`` of a split master.
      Answered while the state is at ``version`` and no sweep changes it.

    * ``words`` with the version (:class:`StateWords`). Equal words before and after mean that bytes
      read in between are of that version.

    A range has at most :data:`MAX_RANGE_BYTES`. Large arrays are requested piece by piece, so that
    neither side holds more than a few ranges in its queues.
    """

    run_id: str
    epoch: int
    attempt: int
    array: Literal["weights", "frozen", "grads", "state", "words"]
    block: int
    version: int
    contribution: int
    name: str = ""
    offset: int = 0
    num_bytes: int = 0

    @property
    def key(self) -> ArrayKey:
        """Key of the array in the node's layout."""
        if self.array == "weights":
            return (self.block, "weights", self.version % 2, 0)
        if self.array == "grads":
            return (self.block, "grads", self.version % 2, self.contribution)
        if self.array == "state" and self.name == "high":
            return (self.block, "weights", self.version % 2, 0)
        if self.array == "state":
            return (self.block, self.name, 0, 0)
        return (self.block, "frozen", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWords:
    """Content of ``words`` of a block: the memory's incarnation, and the version of its state,
    :data:`~penstock.shm.control.INVALID_VERSION` while a sweep changes it.
    """

    incarnation: int
    state_version: int

    def pack(self) -> bytes:
        """Returns 16 bytes, little-endian."""
        return _STATE_WORDS.pack(self.incarnation, self.state_version)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> StateWords:
        """Returns the words of 16 bytes."""
        incarnation, state_version = _STATE_WORDS.unpack(data)
        return cls(incarnation=incarnation, state_version=state_version)


_STATE_WORDS = struct.Struct("<2Q")
STATE_WORDS_BYTES = _STATE_WORDS.size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReply:
    """``ok``: the range follows in frames of :data:`CHUNK_BYTES`; ``wait``: not there yet.

    ``array_bytes`` is the size of the whole array. ``error`` has the reason of a refusal.
    """

    status: Literal["ok", "wait", "error"]
    block: int
    version: int
    offset: int
    num_bytes: int
    array_bytes: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOffer:
    """fetchd to the memoryd of its node, again and again: what other nodes can read, and how.

    ``generation``: drawn at each start of a fetchd; it stands in its memory at ``identity``, too.
    ``metadata``: of the library that moves the bytes. ``segments``: (kind, address, bytes).
    """

    run_id: str
    node: str
    pid: int
    generation: int
    metadata: bytes
    identity: int
    segments: tuple[tuple[str, int, int], ...]
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """fetchd to the memoryd of another node: what does your fetchd offer? ``generation``: of the
    last one met there, 0 if none.
    """

    run_id: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """The newest offer of a living fetchd, if there is one; else ``error`` has the reason."""

    offers: tuple[AgentOffer, ...]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """fetchd to a process of its node, with a descriptor: memory for ``slots`` ranges at a time."""

    generation: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Request of a process of the node to fetchd: read a range of an array into slot ``slot``. The
    array is of the node with a memoryd on ``address``. ``serial`` distinguishes requests of a
    connection.
    """

    serial: int
    address: str
    slot: int
    block: BlockRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReply:
    """Reply of fetchd. ``ok``: the range is in its slot, all of one moment, which ``incarnation``
    and ``sequence`` name. ``wait``: the array is not complete yet. ``torn``: a writer changed it
    meanwhile. ``away``: the node cannot be reached now; ``error`` has the reason.
    """

    serial: int
    status: Literal["ok", "wait", "torn", "away"]
    incarnation: int
    sequence: int
    error: str


Header = (
    Transfer
    | GroupAddress
    | TransferShape
    | GradientReady
    | BlockUpdated
    | LeaseRequest
    | LeaseReply
    | BlockRequest
    | BlockReply
    | AgentOffer
    | AgentRequest
    | AgentReply
    | Staging
    | ReadRequest
    | ReadReply
)
H = TypeVar("H", bound=Header)


_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {kind.__name__: kind for kind in typing.get_args(Header)}
)
_HINTS: Mapping[type[Any], Mapping[str, Any]] = MappingProxyType(
    {kind: typing.get_type_hints(kind) for kind in (*_KINDS.values(), TensorHeader)}
)
_INVALID = object()


def encode(header: Header) -> bytes:
    """Returns the header frame.

    Raises:
        ProtocolError: it would be larger than :data:`MAX_HEADER_BYTES`.
    """
    body = [type(header).__name__, _fields_of(header)]
    data: bytes = msgpack.packb(body, use_bin_type=True)
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"{body[0]}: header of {len(data)} bytes, limit {MAX_HEADER_BYTES}")
    return data


def decode(data: bytes | memoryview, *expected: type[H]) -> H:
    """Parses a header frame that must be one of ``expected``.

    Raises:
        ProtocolError: the frame is too large, not msgpack, another message, or has a missing,
            unknown or mistyped field. No other exception, for any bytes.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(data)} bytes, limit {MAX_HEADER_BYTES}")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack has no common base: ValueError, UnicodeDecodeError, …
        raise ProtocolError(f"not a message header: {error}") from error
    if not (isinstance(body, list) and len(body) == 2 and isinstance(body[1], dict)):
        raise ProtocolError("not a message header: expected [name, fields]")
    kind = _KINDS.get(body[0]) if isinstance(body[0], str) else None
    if kind is None or kind not in expected:
        names = " or ".join(kind.__name__ for kind in expected)
        raise ProtocolError(f"expected {names}, got {_clip(body[0])}")
    return typing.cast(H, _build(kind, body[1]))


def _fields_of(message: Any) -> dict[str, Any]:
    """Returns ``dataclasses.asdict`` without its copies of every value."""
    return {name: _plain(getattr(message, name)) for name in _HINTS[type(message)]}


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return [_plain(item) for item in value]
    return _fields_of(value) if type(value) in _HINTS else value


def _build(kind: type[Any], fields: dict[Any, Any]) -> Any:
    hints = _HINTS[kind]
    if fields.keys() != hints.keys():
        odd = sorted(_clip(key) for key in fields.keys() ^ hints.keys())
        raise ProtocolError(f"{kind.__name__}: missing or unknown fields: {', '.join(odd[:5])}")
    values = {name: _coerce(hint, fields[name]) for name, hint in hints.items()}
    for name, value in values.items():
        if value is _INVALID:
            raise ProtocolError(
                f"{kind.__name__}.{name}: {_clip(fields[name])} is not a valid value"
            )
    return kind(**values)


def _coerce(hint: Any, value: Any) -> Any:
    """Returns ``value`` as the field type ``hint``, or ``_INVALID``. An int is never negative."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value if isinstance(value, str) and value in typing.get_args(hint) else _INVALID
    if origin is tuple:
        return _coerce_tuple(typing.get_args(hint), value)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value) if isinstance(value, dict) else _INVALID
    if hint is float:
        return float(value) if type(value) in (int, float) else _INVALID
    return value if type(value) is hint and not (hint is int and value < 0) else _INVALID


def _coerce_tuple(hints: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list):
        return _INVALID
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        return _INVALID
    items = tuple(_coerce(hint, item) for hint, item in zip(hints, value, strict=True))
    return _INVALID if any(item is _INVALID for item in items) else items


def _clip(value: Any) -> str:
    """Returns a short text of a value of unknown type, which may be nested too deeply for repr."""
    if isinstance(value, (str, bytes, int, float, bool)):
        return repr(value[:60] if isinstance(value, (str, bytes)) else value)
    return f"a {type(value).__name__}"
