"""A record of a file of data, and the errors that name its place and columns. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError
from penstock.models.data.reading.opening import CountBytes

TEXT = "text"
"""The column that training on plain text takes."""

_CHAT = frozenset(
    {
        *("messages", "conversations", "conversation", "dialog"),
        *("prompt", "completion", "response", "chosen", "rejected"),
        *("instruction", "input", "output", "input_ids"),
    }
)
"""Columns of fine-tuning data."""

_MAX_COLUMNS, _MAX_NAME = 8, 40
"""Number of columns that an error names, and characters of each name."""

_TYPES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
"""Types of JSON values in words for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of the file ``path``. Its ``fields`` map columns to values, and ``where`` names the
    place in the file, such as ``line 3``. A file of text is one record with an empty ``where``:
    ``parts`` of its text are read once and in order.
    """

    path: Path
    where: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    parts: Iterable[str] = ()

    @property
    def place(self) -> str:
        """The file and the place in it, for errors."""
        return f"{self.path}, {self.where}" if self.where else str(self.path)


Reader = Callable[[Path, str, CountBytes, str | None], Iterator[Record]]
"""Function that yields the records of a file in an encoding. It passes each number of bytes read to
its third argument. The last one is the only column that is read, which must be text; None reads all
columns.
"""


def text_of(record: Record) -> str:
    """Returns the text of a record with fields.

    Raises:
        ConfigError: the record has no column ``text``, or no text in it.
    """
    if TEXT not in record.fields:
        raise without_text(record.place, list(record.fields))
    text = record.fields[TEXT]
    if not isinstance(text, str):
        raise not_text(record.place, _TYPES.get(type(text), type(text).__name__))
    return text


def check_columns(place: str, columns: Sequence[str]) -> None:
    """Refuses columns of a table without exactly one column ``text``.

    Raises:
        ConfigError: the column is missing, or occurs twice.
    """
    if TEXT not in columns:
        raise without_text(place, columns)
    if columns.count(TEXT) > 1:
        raise ConfigError(f"{place}: has the column {TEXT} {columns.count(TEXT)} times")


def without_text(place: str, columns: Sequence[str]) -> ConfigError:
    """Returns the error for a record or a table without the column ``text``."""
    shown = ", ".join(shown_name(name) for name in columns[:_MAX_COLUMNS])
    if len(columns) > _MAX_COLUMNS:
        shown += f" and {len(columns) - _MAX_COLUMNS:,} more"
    names = f"its columns are {shown}" if columns else "it has no columns"
    return ConfigError(
        f"{place}: has no column {TEXT}, which training on plain text needs; {names}"
    )


def is_chat(fields: Mapping[str, Any]) -> bool:
    """Returns whether a record has columns of fine-tuning data."""
    return not _CHAT.isdisjoint(fields)


def not_text(place: str, kind: str) -> ConfigError:
    """Returns the error for a column ``text`` that holds a value of another ``kind``."""
    return ConfigError(f"{place}: the column {TEXT} holds {kind}, and a record needs a text in it")


def expected(place: str, example: str, why: str = "") -> ConfigError:
    """Returns the error for a place without a value like ``example``."""
    cause = f" ({why})" if why else ""
    return ConfigError(f"{place}: expected a JSON object such as {example}{cause}")


def shown_name(name: str) -> str:
    """Returns the name of a column, which may be any text, in a form for errors."""
    short = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
    return short if short and short.isprintable() else ascii(short)
