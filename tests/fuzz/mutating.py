"""Changes inputs: bytes at random places, and values of JSON and MessagePack in their own terms.

Every input follows from the target's name and a number, so a failure is repeated by these two.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

from tests.fuzz.target import MAX_INPUT_BYTES, Form

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    2**64 - 1,
    10**40,
    10**400,
    0.5,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "a",
    "²",
    "1e999",
    "\0",
    "../x",
    "\ud800",
    "x" * 300,
    [],
    [[]],
    {},
    {"": None},
    [0] * 50,
)
"""Values that stand in for others."""

PIECES: tuple[bytes, ...] = (
    b"\0",
    b"\xff",
    b"\n",
    b"\r\n",
    b"\0" * 8,
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\x80" + bytes(7),
    (2**40).to_bytes(8, "little"),
    (2**40).to_bytes(8, "big"),
    b"Infinity",
    b"NaN",
    b"-1",
    b"1e999",
    b"null",
    b"[" * 2000,
    b'{"a":' * 500,
    b"\xdd\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    "²".encode(),
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
)
"""What decoders stumble over, put in where it lands."""


class Mutator:
    """Makes inputs out of others."""

    def __init__(self, form: Form, inputs: Sequence[bytes]) -> None:
        self._form = form
        self._inputs = [data for data in inputs if data] or [b"\0"]

    def example(self, name: str, number: int) -> bytes:
        """Returns the input with this number."""
        chance = random.Random(f"{name}/{number}")
        return self.changed(chance.choice(self._inputs), chance)

    def changed(self, data: bytes, chance: random.Random) -> bytes:
        """Returns ``data`` with a few changes."""
        structured = _STRUCTURED.get(self._form)
        if structured is not None and chance.random() < 0.7:
            found = structured(data, chance)
            if found is not None:
                data = found
                if chance.random() < 0.8:
                    return data[:MAX_INPUT_BYTES]
        for _ in range(chance.choice((1, 1, 2, 4, 8))):
            data = chance.choice(_CHANGES)(data, chance, self._inputs)
        return data[:MAX_INPUT_BYTES]


def _flip(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    if not data:
        return data
    place = chance.randrange(len(data))
    return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]


def _insert(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    place = chance.randint(0, len(data))
    return data[:place] + chance.choice(PIECES) + data[place:]


def _replace(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    piece = chance.choice(PIECES)
    place = chance.randint(0, len(data))
    return data[:place] + piece + data[place + len(piece) :]


def _delete(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    start = chance.randint(0, len(data))
    return data[:start] + data[start + chance.choice((1, 2, 8, 64)) :]


def _cut(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return data[: chance.randint(0, len(data))]


def _repeat(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    start = chance.randint(0, len(data))
    part = data[start : start + chance.choice((1, 4, 32, 256))]
    return data[:start] + part * chance.choice((2, 3, 30)) + data[start + len(part) :]


def _splice(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    other = chance.choice(others)
    return data[: chance.randint(0, len(data))] + other[chance.randint(0, len(other)) :]


_CHANGES: tuple[Callable[[bytes, random.Random, Sequence[bytes]], bytes], ...] = (
    _flip,
    _flip,
    _insert,
    _replace,
    _delete,
    _cut,
    _repeat,
    _splice,
)


def _in_json(data: bytes, chance: random.Random) -> bytes | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return json.dumps(_with_odd_values(value, chance)).encode()


def _in_lines(data: bytes, chance: random.Random) -> bytes | None:
    lines = data.split(b"\n")
    place = chance.randrange(len(lines))
    changed = _in_json(lines[place], chance)
    if changed is None:
        return None
    lines[place] = changed
    return b"\n".join(lines)


def _in_msgpack(data: bytes, chance: random.Random) -> bytes | None:
    try:
        value = msgpack.unpackb(data)
        packed: bytes = msgpack.packb(_with_odd_values(value, chance))
    except Exception:  # msgpack has no common base, and cannot pack all of ODD
        return None
    return packed


def in_pieces(data: bytes) -> list[bytes]:
    """Returns the frames of a message: each begins with two bytes that say how long it is."""
    found = []
    while data:
        size = int.from_bytes(data[:2], "big")
        found.append(data[2 : 2 + size])
        data = data[2 + size :]
    return found


def joined(*frames: bytes) -> bytes:
    """The inverse of :func:`in_pieces`."""
    return b"".join(len(frame).to_bytes(2, "big") + frame for frame in frames)


def _in_frames(data: bytes, chance: random.Random) -> bytes | None:
    frames = in_pieces(data)
    if not frames:
        return None
    place = chance.randrange(len(frames))
    act = chance.randrange(6)
    if act == 0:
        del frames[place]
    elif act == 1:
        frames.insert(place, frames[place])
    elif act == 2:
        frames[place] = frames[place][: chance.randint(0, len(frames[place]))]
    else:
        frames[0] = _in_msgpack(frames[0], chance) or frames[0]
    return joined(*frames)


def _with_odd_values(value: Any, chance: random.Random) -> Any:
    """Returns a value in which one or two places hold something else."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(chance.choice(ODD))
        inside, key = chance.choice(places)
        act = chance.randrange(5)
        if act == 0:
            del inside[key]
        elif act == 1 and isinstance(inside, dict):
            inside[str(key) + "x"] = inside[key]
        elif act == 1:
            inside.insert(key, copy.deepcopy(inside[key]))
        else:
            inside[key] = copy.deepcopy(chance.choice(ODD))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields where values stand: a list or an object, and the index or key there."""
    pending = [value]
    while pending:
        inside = pending.pop()
        if isinstance(inside, dict):
            keys: Sequence[Any] = list(inside)
        elif isinstance(inside, list):
            keys = range(len(inside))
        else:
            continue
        for key in keys:
            yield inside, key
            pending.append(inside[key])


_STRUCTURED: dict[Form, Callable[[bytes, random.Random], bytes | None]] = {
    Form.JSON: _in_json,
    Form.LINES: _in_lines,
    Form.MSGPACK: _in_msgpack,
    Form.FRAMES: _in_frames,
}
