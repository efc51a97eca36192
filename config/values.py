"""Types of the configuration's values: units, and what people write in more than one way (sizes,
shares, cores).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from penstock.host.topology import parse_cpus

BYTE = "byte"
"""Name of the tokenizer with bytes as tokens."""

UTF8 = "utf-8"
"""The encoding of text unless a key names another one."""

NEXT_TOKEN = "next-token"
MASKED = "masked"
WEIGHTED = "weighted"
DPO = "dpo"
ORPO = "orpo"
SIMPO = "simpo"
"""Values of ``data.objective``: each next token, masked tokens, each next token with a weight, or
the preferred answer of a pair, by three losses.
"""

PAIR_OBJECTIVES = (DPO, ORPO, SIMPO)
"""Objectives of pairs of answers; each has a section of its own in ``data``."""

ROW_OBJECTIVES = (NEXT_TOKEN, WEIGHTED, *PAIR_OBJECTIVES)
"""Objectives that take rows of whole samples."""

RECORD_OBJECTIVES = (WEIGHTED, *PAIR_OBJECTIVES)
"""Objectives that need columns of records."""

AUTO = "auto"
"""Value of keys that Penstock decides; as ``schedule.scheme``, the tuner does."""

SDPA = "sdpa"
"""Value of `model.attention` that leaves kernels to torch, as runs older than the key did."""

_TOKEN = "a token's text or number"
_ENDS = f"auto, false, {_TOKEN}, or a list of tokens such as [<|eot_id|>, 128001]"
_CORES = "auto, a list of CPU numbers, or ranges such as 0-3,8"
_LEFT = "auto or a share of the physical cores, 0 or more and below 1, such as 1/4"
_FRACTION = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*/\s*\d+(\.\d+)?\s*$"}
_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Accepts:
    """Words for what a key accepts, where type and limits alone say it too dryly."""

    words: str


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit in which a number is given."""

    name: str


@dataclass(frozen=True, slots=True)
class Old:
    """Mark of a key that is accepted for one more version, and listed nowhere."""


Steps = Annotated[int, Unit("steps")]
Attempts = Annotated[int, Unit("attempts")]
Sequences = Annotated[int, Unit("sequences")]
Seconds = Annotated[float, Unit("seconds")]


def parse_steps(value: int | float) -> int | float:
    """Returns a whole number of steps as int, and a share below 1 as it is.

    Raises:
        ValueError: a number above 1 that is not whole.
    """
    if isinstance(value, int) or value.is_integer():
        return int(value)
    if value > 1.0:
        raise ValueError(f"accepted is {_STEPS}")
    return value


_STEPS = "a whole number of steps, or a share of train.steps below 1, such as 0.03"

StepsOrShare = Annotated[
    int | float,
    Field(ge=0),
    AfterValidator(parse_steps),
    Accepts(_STEPS),
    Unit("steps"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            ]
        }
    ),
]


def parse_size(value: Any) -> int:
    """Returns bytes from ``20G``, ``512M``, ``1.5T`` (powers of two) or an integer.

    Raises:
        ValueError: it is no size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value))
    if match is None:
        raise ValueError("a size is a number of bytes or a number with K, M, G or T, such as 20G")
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if size >= 2**63:
        raise ValueError("a size is below 2^63 bytes")
    return int(size)


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=0),
    Accepts("a size such as 20G or 512M"),
    Unit("bytes"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGT]?)(i?B)?\s*$"},
            ]
        }
    ),
]


def parse_share(value: Any) -> float:
    """Returns a share from ``0.001`` or ``1/1000``.

    Raises:
        ValueError: it is no share.
    """
    numerator, slash, denominator = str(value).partition("/")
    try:
        return float(numerator) / float(denominator if slash else 1.0)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError("a share is a number or a fraction such as 1/1000") from error


Share = Annotated[
    float,
    BeforeValidator(parse_share),
    Field(gt=0.0, le=1.0),
    Accepts("a share above 0 and at most 1, such as 1/1000"),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, _FRACTION]}),
]


def parse_micro_batch(value: Any) -> Any:
    """Returns :data:`CHOSEN_LATER` from ``auto``, and other values as they are.

    Raises:
        ValueError: a number below 1.
    """
    if value == AUTO:
        return CHOSEN_LATER
    if type(value) is int and value < 1:
        raise ValueError("accepted is auto, or a whole number, 1 or more")
    return value


CHOSEN_LATER = 0
"""Number that stands for ``train.micro_batch: auto``, and for the steps of ``train.epochs``, until
the preparation has chosen.
"""

PAIR = 2
"""Rows of a pair of answers: the least micro-batch of objectives of pairs, and its divisor."""

MicroBatch = Annotated[
    int,
    BeforeValidator(parse_micro_batch),
    PlainSerializer(lambda value: value or AUTO, return_type=Any),
    Field(ge=0),
    Accepts("auto, or a whole number, 1 or more"),
    Unit("sequences"),
    WithJsonSchema({"anyOf": [{"const": AUTO}, {"type": "integer", "minimum": 1}]}),
]


def parse_cores(value: Any) -> Any:
    """Returns CPU numbers from a list or from ``0-3,8``; ``auto`` as it is.

    Raises:
        ValueError: it is neither, or has a number twice.
    """
    if value == AUTO:
        return value
    cores = tuple(value) if isinstance(value, (list, tuple)) else parse_cpus(str(value))
    if not cores or not all(type(core) is int and core >= 0 for core in cores):
        raise ValueError(f"accepted is {_CORES}")
    if len(set(cores)) < len(cores):
        raise ValueError("a core is named twice; each takes one thread")
    return cores


def parse_leave(value: Any) -> Any:
    """Returns a share below 1, or ``auto`` as it is.

    Raises:
        ValueError: it is neither.
    """
    share = value if value == AUTO else parse_share(value)
    if share != AUTO and not 0.0 <= share < 1.0:
        raise ValueError(f"accepted is {_LEFT}")
    return share


def parse_end_tokens(value: Any) -> Any:
    """Returns ``auto``, False, or a tuple of tokens (texts and numbers) from one token or a list.

    Raises:
        ValueError: a value is no token, the list is empty, or a token is named twice.
    """
    if value is False or value == AUTO:
        return value
    tokens = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not tokens or not all(_is_token(token) for token in tokens):
        raise ValueError(f"accepted is {_ENDS}")
    if len(set(tokens)) < len(tokens):
        raise ValueError("a token is named twice")
    return tokens


def _is_token(value: Any) -> bool:
    """Returns whether a value is a text or a number that a token may have."""
    return (isinstance(value, str) and value != "") or (type(value) is int and 0 <= value < 2**32)


EndTokens = Annotated[
    Literal["auto"] | bool | tuple[int | str, ...],
    BeforeValidator(parse_end_tokens),
    Accepts(_ENDS),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": AUTO},
                {"const": False},
                {"type": "integer", "minimum": 0},
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": ["integer", "string"]},
                },
            ]
        }
    ),
]
Cores = Annotated[
    Literal["auto"] | tuple[int, ...],
    BeforeValidator(parse_cores),
    Accepts(_CORES),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": AUTO},
                {"type": "array", "items": {"type": "integer", "minimum": 0}},
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*$"},
            ]
        }
    ),
]
LeftShare = Annotated[
    Literal["auto"] | float,
    BeforeValidator(parse_leave),
    Accepts(_LEFT),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": AUTO},
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                _FRACTION,
            ]
        }
    ),
]


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the patterns.

    Raises:
        ValueError: one of them is no regular expression.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from error
    return patterns


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[
    tuple[str, ...],
    Field(min_length=1),
    BeforeValidator(_listed),
    AfterValidator(check_patterns),
    Accepts("a regular expression such as lm_head, or a list of them"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
            ]
        }
    ),
]


def human_bytes(num_bytes: float) -> str:
    """Returns bytes in binary units, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024.0:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024.0
    return f"{num_bytes:.1f} TiB"
