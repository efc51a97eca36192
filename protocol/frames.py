"""Data-plane messages: one msgpack header frame, then raw buffers, over ZeroMQ. Never pickle.

Every header is one frozen dataclass below; the first element on the wire is its name. Decoding checks
sizes and types and raises :class:`~penstock.protocol.errors.ProtocolError` for anything else, so arbitrary
bytes never crash a daemon.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import msgpack

from penstock.protocol.errors import ProtocolError

MAX_HEADER_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20
"""Raw buffers of block ranges travel in frames of this size: the fastest for ZeroMQ over TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One named tensor: its raw bytes are the frame at the same position after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Activations, gradients or a checkpoint between workers; one raw frame per tensor follows.

    ``kind`` with ``stage`` and ``micro_batch`` as in :mod:`penstock.protocol.instructions`. ``attempt`` is the
    attempt, or the evaluation's number when ``phase`` is ``eval``.
    """

    run_id: str
    epoch: int
    phase: Literal["train", "eval"]
    attempt: int
    kind: Literal["activation", "gradient", "checkpoint"]
    stage: int
    micro_batch: int
    tensors: tuple[TensorHeader, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReady:
    """Worker to optimizerd of its node: a contribution of a block is complete (its ready word is set)."""

    run_id: str
    epoch: int
    attempt: int
    block: int
    contribution: int


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
    layout_digest: bytes
    undo_bytes: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """Ask a memoryd for an array of a block.

    ``array`` is ``weights`` (at ``version``; answered only when complete and committed), ``frozen``, or ``grads``
    (contribution ``contribution`` of copy ``version % 2``; answered only when its ready word says (epoch, attempt)).
    """

    run_id: str
    epoch: int
    attempt: int
    array: Literal["weights", "frozen", "grads"]
    block: int
    version: int
    contribution: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReply:
    """``status`` ``ok``: the array follows in frames of :data:`CHUNK_BYTES`; ``wait``: not complete yet, ask again."""

    status: Literal["ok", "wait", "error"]
    block: int
    version: int
    num_bytes: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStatus:
    """Published by optimizerd on its PUB socket after each pass of a block."""

    run_id: str
    epoch: int
    attempt: int
    block: int
    pass_name: str
    finite: bool
    sum_squares: float
    seconds: float


Header = (
    Transfer
    | GradientReady
    | LeaseRequest
    | LeaseReply
    | BlockRequest
    | BlockReply
    | OptimizerStatus
)
H = TypeVar("H", bound=Header)


class _Registry:
    kinds: ClassVar[dict[str, type[Any]]] = {
        kind.__name__: kind for kind in typing.get_args(Header)
    }


def encode(header: Header) -> bytes:
    """The header frame.

    Raises:
        ProtocolError: it would be larger than :data:`MAX_HEADER_BYTES`.
    """
    body = [type(header).__name__, dataclasses.asdict(header)]
    data: bytes = msgpack.packb(body, use_bin_type=True)
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"{body[0]}: header of {len(data)} bytes, limit {MAX_HEADER_BYTES}")
    return data


def decode(data: bytes | memoryview, expected: type[H]) -> H:
    """Parse a header frame that must be an ``expected``.

    Raises:
        ProtocolError: too large, not msgpack, another message, a missing, unknown or mistyped field.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(data)} bytes, limit {MAX_HEADER_BYTES}")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (
        Exception
    ) as error:  # msgpack raises ValueError subclasses, UnicodeDecodeError, RecursionError …
        raise ProtocolError(f"not a message header: {error}") from error
    if not (isinstance(body, list) and len(body) == 2 and isinstance(body[1], dict)):
        raise ProtocolError("not a message header: expected [name, fields]")
    if not isinstance(body[0], str) or _Registry.kinds.get(body[0]) is not expected:
        raise ProtocolError(f"expected {expected.__name__}, got {str(body[0])[:40]!r}")
    return typing.cast(H, _build(expected, body[1]))


def _build(kind: type[Any], fields: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    if set(fields) != set(hints):
        odd = sorted(map(str, set(fields) ^ set(hints)))
        raise ProtocolError(f"{kind.__name__}: missing or unknown fields {odd}")
    return kind(**{name: _coerce(kind, name, hint, fields[name]) for name, hint in hints.items()})


def _coerce(kind: type[Any], name: str, hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_coerce(kind, name, arguments[0], item) for item in value)
        if len(value) == len(arguments):
            return tuple(
                _coerce(kind, name, inner, item)
                for inner, item in zip(arguments, value, strict=True)
            )
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type[Any], hint), value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint and not (hint is int and value < 0):
        return value
    raise ProtocolError(f"{kind.__name__}.{name}: {str(value)[:60]!r} is not a valid value")
