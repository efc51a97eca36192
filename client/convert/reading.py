"""KeyReading the values of another trainer's file, with a record of each key's fate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.client.convert.keys import Effect, Key, Table, ValueKind
from penstock.config.reading import read_mapping
from penstock.host.errors import ConfigError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SHOWN = 80


@dataclass(slots=True, kw_only=True)
class KeyReading:
    """The values of a file, and the configuration that is made of the values.

    ``mapped`` and ``dropped`` list keys in the order of the conversion, as ``--json`` shows them.
    """

    path: Path
    values: Mapping[str, Any]
    table: Table
    devices: int
    written: Mapping[str, str] = field(default_factory=dict)
    """Names of keys in the file, where they are earlier names."""
    objective: str | None = None
    """The objective of pairs that the user names, where the file does not tell it."""
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    mapped: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        path: Path,
        table: Table,
        devices: int,
        old: Mapping[str, str] | None = None,
        objective: str | None = None,
    ) -> KeyReading:
        """Reads a file; ``old`` maps earlier names of keys to today's.

        Raises:
            ConfigError: the file cannot be read, or a value has another type.
        """
        values: dict[str, Any] = {}
        names: dict[str, str] = {}
        for written, value in read_mapping(path).value.items():
            name = (old or {}).get(str(written), str(written))
            if name in values:
                raise ConfigError(f"{path}: {written}: is an old name of {name}; keep one")
            key = table.get(name)
            if value is None and (key is None or not key.empty):
                continue
            names[name] = str(written)
            values[name] = value if key is None else _typed(path, str(written), key, value)
        return cls(
            path=path,
            values=values,
            table=table,
            devices=devices,
            written=names,
            objective=objective,
        )

    def get(self, key: str) -> Any:
        """Returns the value of a known key, or the trainer's default."""
        return self.values.get(key, self.table[key].default)

    def put(self, place: str, value: Any, *keys: str, note: str = "") -> None:
        """Sets a key of the configuration; ``keys`` are the trainer's keys that decide it."""
        section, _, name = place.partition(".")
        self.config.setdefault(section, {})[name] = value
        for key in keys:
            self.map(key, {place: value}, note)

    def map(self, key: str, to: Mapping[str, Any], note: str = "") -> None:
        """Records a key with its places in the configuration."""
        shown_key = self.written.get(key, key)
        for entry in self.mapped:
            if entry["key"] == shown_key:
                entry["to"].update(to)
                if note and note not in entry.get("note", ""):
                    entry["note"] = note
                return
        entry = {"key": shown_key, "value": self.get(key), "to": dict(to)}
        if key not in self.values:
            entry["default"] = True
        self.mapped.append(entry | ({"note": note} if note else {}))

    def drop(self, key: str, why: str, effect: Effect = Effect.RESULT, value: Any = None) -> None:
        """Records a key that has no place in the configuration."""
        if value is None:
            value = self.values.get(key, self.table[key].default if key in self.table else None)
        name = self.written.get(key, key)
        self.dropped.append({"key": name, "value": value, "why": why, "effect": effect.value})

    def drop_rest(self) -> None:
        """Records each given key that is unknown, or has no place in Penstock."""
        for name, value in self.values.items():
            if self.has(name):
                continue
            key = self.table.get(name)
            if key is None:
                self.drop(name, "Penstock does not know this key")
            elif key.effect is None and value != key.default:
                self.drop(name, "another key decides", Effect.NONE)
            elif key.effect is not None and value != key.default:
                self.drop(name, key.why, key.effect)

    def has(self, key: str) -> bool:
        """Returns whether the fate of a key is recorded."""
        name = self.written.get(key, key)
        return any(entry["key"] == name for entry in (*self.mapped, *self.dropped))

    def refused(self, key: str, value: Any, remedy: str) -> ConfigError:
        """Returns the error for a value of the file."""
        return ConfigError(f"{self.path}: {key} = {shown(value)}: {remedy}")

    def typed(self, place: str, kind: ValueKind, value: Any) -> Any:
        """Returns a value inside of a list or mapping.

        Raises:
            ConfigError: the value has another type.
        """
        return _typed(self.path, place, Key(kind=kind), value)


def shown(value: Any) -> str:
    """Returns the start of a value."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _typed(path: Path, place: str, key: Key, value: Any) -> Any:
    """Returns a value of the key's type.

    Raises:
        ConfigError: the value has another type.
    """
    kind = key.kind
    if value is None or kind is ValueKind.ANY:
        return value
    if kind in (ValueKind.NUMBER, ValueKind.WHOLE) and isinstance(value, str):
        # YAML 1.1 reads 2e-5 as a text, and these trainers read the text as a number.
        value = float(value) if _NUMBER.fullmatch(value.strip()) else value
    if kind is ValueKind.WHOLE and isinstance(value, float) and value.is_integer():
        value = int(value)
    types: Mapping[ValueKind, type | tuple[type, ...]] = {
        ValueKind.FLAG: bool,
        ValueKind.NUMBER: (int, float),
        ValueKind.WHOLE: int,
        ValueKind.TEXT: str,
        ValueKind.LIST: list,
        ValueKind.MAPPING: dict,
    }
    is_flag = isinstance(value, bool)
    if not isinstance(value, types[kind]) or (is_flag and kind is not ValueKind.FLAG):
        raise ConfigError(f"{path}: {place} = {shown(value)}: needs {kind.value}")
    return value
