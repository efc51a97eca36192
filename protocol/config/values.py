"""Values of the configuration that people write in more than one way, or leave out: sizes, shares,
cores, the tokenizer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from penstock.shm.topology import parse_cpus

if TYPE_CHECKING:
    from penstock.protocol.config.schema import Config

BYTE = "byte"
"""The tokenizer whose tokens are bytes."""

_AUTO = "auto"
_CORES = "auto, a list of CPU numbers, or ranges such as 0-3,8"
_LEFT = "auto or a share of the physical cores, 0 or more and below 1, such as 1/4"
_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(value: Any) -> int:
    """Bytes from ``20G``, ``512M``, ``1.5T`` (powers of two) or an integer.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value))
    if match is None:
        raise ValueError("a size is a number of bytes or a number with K, M, G or T, such as 20G")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


Size = Annotated[
    int, BeforeValidator(parse_size), Field(ge=0, description="a size such as 20G or 512M")
]


def parse_share(value: Any) -> float:
    """A share from ``0.001`` or ``1/1000``.

    Raises:
        ValueError: not a share.
    """
    numerator, slash, denominator = str(value).partition("/")
    try:
        return float(numerator) / float(denominator if slash else 1.0)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError("a share is a number or a fraction such as 1/1000") from error


Share = Annotated[
    float,
    BeforeValidator(parse_share),
    Field(gt=0.0, le=1.0, description="a share above 0 and at most 1, such as 1/1000"),
]


def parse_cores(value: Any) -> Any:
    """CPU numbers from a list or from ``0-3,8``; ``auto`` as it is.

    Raises:
        ValueError: neither, or a number twice.
    """
    if value == _AUTO:
        return value
    cores = tuple(value) if isinstance(value, (list, tuple)) else parse_cpus(str(value))
    if not cores or not all(type(core) is int and core >= 0 for core in cores):
        raise ValueError(f"accepted is {_CORES}")
    if len(set(cores)) < len(cores):
        raise ValueError("a core is named twice; each takes one thread")
    return cores


def parse_leave(value: Any) -> Any:
    """A share below 1, or ``auto`` as it is.

    Raises:
        ValueError: neither.
    """
    share = value if value == _AUTO else parse_share(value)
    if share != _AUTO and not 0.0 <= share < 1.0:
        raise ValueError(f"accepted is {_LEFT}")
    return share


Cores = Annotated[
    Literal["auto"] | tuple[int, ...],
    BeforeValidator(parse_cores),
    Field(description=_CORES),
]
LeftShare = Annotated[
    Literal["auto"] | float, BeforeValidator(parse_leave), Field(description=_LEFT)
]


def tokenizer_of(config: Config) -> str | None:
    """``byte`` or a path: what ``data.tokenizer`` says or, unset, stands for; ``None`` where tokens
    come from a file.
    """
    if config.data.tokens is not None:
        return None
    if config.data.tokenizer is not None:
        return config.data.tokenizer
    # Emulated devices bring their model, and any tokens will do.
    own = config.model.path if config.cluster.emulated is None else None
    return BYTE if own is None else str(own)
