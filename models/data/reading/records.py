"""Records of the files of a source, with the file and the line that each comes from. No torch.

A file of text is one record. A file of JSON lines has a record for each line: a mapping, of which
training on plain text takes the field ``text``. Text is decoded strictly
(:mod:`penstock.models.data.reading.decoding`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.models.data.reading.decoding import MARK, CountBytes, decoded, ignore_bytes
from penstock.models.data.sources import FORMATS, Source
from penstock.protocol.errors import ConfigError, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of the file ``path``: in its ``line`` (from 1) the mapping ``fields``; or, where
    ``line`` is None, the whole file, in ``parts`` of its text that are read once and in order.
    """

    path: Path
    line: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    parts: Iterable[str] = ()

    @property
    def place(self) -> str:
        """The file and the line in words for errors."""
        return str(self.path) if self.line is None else f"{self.path}, line {self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text to train on. ``place`` names its record; ``parts`` are read once and in order, before
    the next document.
    """

    place: str
    parts: Iterable[str]


Reader = Callable[[Path, str, CountBytes], Iterator[Record]]
"""Yields the records of a file in an encoding; calls its last argument with numbers of bytes."""


def records(source: Source, read: CountBytes = ignore_bytes) -> Iterator[Record]:
    """Yields the records of all files of a source, in order. Calls ``read`` with the number of
    bytes of each part of a file.

    Raises:
        ConfigError: a file that cannot be read or is in another encoding, or a line without a JSON
            object.
    """
    for path in source.files:
        try:
            yield from _READERS[path.suffix](path, source.encoding, read)
        except OSError as error:
            raise ConfigError(f"data: cannot read {path}: {reason(error)}") from error


def documents(source: Source, read: CountBytes = ignore_bytes) -> Iterator[Document]:
    """Yields the documents of a source: files of text, and the ``text`` of each record with
    fields. Empty ones are left out.

    A byte order mark at the start of a file is no part of its text; ends of lines stay as they are.

    Raises:
        ConfigError: see :func:`records`; or a record without text, or with half of a character.
    """
    for record in records(source, read):
        parts = iter(record.parts if record.line is None else [_text_of(record)])
        first = next(parts, "")
        if first:
            yield Document(place=record.place, parts=_checked(record.place, first, parts))


def expected(record: Record, example: str) -> ConfigError:
    """Returns the error for a record that is not like ``example``."""
    return ConfigError(f"{record.place}: expected a JSON object such as {example}")


def _text_of(record: Record) -> str:
    text = record.fields.get("text")
    if not isinstance(text, str):
        raise expected(record, _EXAMPLE)
    return text


def _checked(place: str, first: str, rest: Iterator[str]) -> Iterator[str]:
    """Yields the parts of a text.

    Raises:
        ConfigError: a part has half of a surrogate pair, which is no character.
    """
    start = 0
    for part in _chained(first, rest):
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{place}: character {start + error.start} of the text is {part[error.start]!a},"
                " half of a surrogate pair, which is no character"
            ) from error
        start += len(part)
        yield part


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _text_record(path: Path, encoding: str, read: CountBytes) -> Iterator[Record]:
    parts = decoded(path, encoding, read)
    yield Record(path=path, parts=parts)
    for _ in parts:  # the rest of a record that its user has left is checked, too
        pass


def _json_records(path: Path, encoding: str, read: CountBytes) -> Iterator[Record]:
    for number, line in enumerate(_lines(decoded(path, encoding, read)), start=1):
        if not line or line.isspace():
            continue
        try:
            # Files that were put together may have a mark at the start of each.
            fields = json.loads(line.removeprefix(MARK))
        except (ValueError, RecursionError) as error:
            raise expected(Record(path=path, line=number), _EXAMPLE) from error
        if not isinstance(fields, dict):
            raise expected(Record(path=path, line=number), _EXAMPLE)
        yield Record(path=path, line=number, fields=fields)


def _lines(parts: Iterable[str]) -> Iterator[str]:
    """Yields lines without their ends; only a line feed ends a line."""
    begun: list[str] = []
    for part in parts:
        first, *others = part.split("\n")
        begun.append(first)
        for other in others:
            yield "".join(begun)
            begun = [other]
    yield "".join(begun)


_EXAMPLE = '{"text": "…"}'

_READERS: Mapping[str, Reader] = {
    **dict.fromkeys(FORMATS, _text_record),
    ".jsonl": _json_records,
}
"""Endings of files and their formats."""
