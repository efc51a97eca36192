"""Keys of another trainer: type, default, and the effect of leaving the key out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Any


class Effect(StrEnum):
    """Effect of a key that a conversion leaves out."""

    NONE = "none"
    SPEED = "speed"
    RESULT = "result"


class ValueKind(Enum):
    """Types of values, by the words that errors use."""

    FLAG = "true or false"
    NUMBER = "a number"
    WHOLE = "an integer"
    TEXT = "a text"
    LIST = "a list"
    MAPPING = "a mapping"
    ANY = "any value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a trainer.

    ``default`` is the trainer's value without the key. ``effect`` and ``why`` are those of a
    dropped key with another value; a key with a place in Penstock has no effect here.
    """

    default: Any = None
    kind: ValueKind = ValueKind.ANY
    effect: Effect | None = None
    why: str = ""
    empty: bool = False
    """True if null is a value of its own; otherwise null stands for the default."""
    places: tuple[str, ...] = ()
    """Keys of Penstock that this key decides, such as ``optimizer.lr``."""
    note: str = ""
    """Words on the value in Penstock, where it differs from the trainer's."""
    used: str = ""
    """Replaces ``why`` where another key of the trainer switches this key on."""


Table = Mapping[str, Key]


def mapped(kind: ValueKind, **defaults: Any) -> dict[str, Key]:
    """Returns keys with a place in Penstock, with their defaults."""
    return {name: Key(default=default, kind=kind) for name, default in defaults.items()}


def dropped(effect: Effect, why: str, **defaults: Any) -> dict[str, Key]:
    """Returns keys without a place in Penstock, with their defaults."""
    return {
        name: Key(default=default, effect=effect, why=why) for name, default in defaults.items()
    }


def without(effect: Effect, why: str, names: str, used: str = "") -> dict[str, Key]:
    """Returns keys without a place in Penstock that are unset by default."""
    return {name: Key(effect=effect, why=why, used=used) for name in names.split()}


def switched(off: str, used: str, **defaults: Any) -> dict[str, Key]:
    """Returns keys without a place in Penstock that another key switches on. ``off`` says why they
    have no effect without that key.
    """
    return {
        name: Key(default=default, effect=Effect.NONE, why=off, used=used)
        for name, default in defaults.items()
    }


def placed(
    keys: Table,
    places: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
    base: Table | None = None,
) -> Table:
    """Returns keys with their places (names with spaces between) and notes. Keys that have neither
    take those of the same key in ``base``.
    """
    made: dict[str, Key] = {}
    for name, key in keys.items():
        other = (base or {}).get(name, key)
        text, note = places.get(name), (notes or {}).get(name, other.note)
        given = other.places if text is None else tuple(text.split())
        made[name] = replace(key, places=given, note=note)
    return made
