"""Records and documents of the files of a source. No torch.

A file of text is one record. Other formats have a record for each line, object or row: columns, of
which training on plain text takes ``text``. Text is decoded strictly
(:mod:`penstock.models.data.reading.decoding`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from penstock.host.errors import ConfigError, reason
from penstock.models.data.reading.columns import arrow_rows, parquet_rows
from penstock.models.data.reading.csv_files import csv_rows
from penstock.models.data.reading.decoding import decoded
from penstock.models.data.reading.json_files import json_lines, json_objects
from penstock.models.data.reading.opening import CountBytes, ignore_bytes
from penstock.models.data.reading.record import TEXT, Reader, Record, text_of
from penstock.models.data.sources import PLAIN_TEXT, Source, format_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text to train on. ``place`` names its record; ``parts`` are read once and in order, before
    the next document. ``ids`` are ready token ids in place of a text.
    """

    place: str
    parts: Iterable[str] = ()
    ids: tuple[int, ...] | None = None


def records(
    source: Source, read: CountBytes = ignore_bytes, only: str | None = None
) -> Generator[Record]:
    """Yields the records of all files of a source, in order. Calls ``read`` with the number of
    bytes of each part of a file. ``only`` is the only column that is read; None reads all.

    Raises:
        ConfigError: a file cannot be read, is damaged or in another encoding, or has a place
            without a record.
    """
    for path in source.files:
        try:
            yield from _READERS[format_of(path)](path, source.encoding, read, only)
        except OSError as error:
            raise ConfigError(f"data: cannot read {path}: {reason(error)}") from error


def documents(source: Source, read: CountBytes = ignore_bytes) -> Iterator[Document]:
    """Yields the documents of a source: files of text, and the ``text`` of each record with
    fields. Empty ones are left out.

    A byte order mark at the start of a file is no part of its text; ends of lines stay as they are.

    Raises:
        ConfigError: see :func:`records`; or a record without text, or with half of a character.
    """
    with closing(records(source, read, TEXT)) as listed:
        for record in listed:
            parts = [text_of(record)] if record.where else record.parts
            yield from document_of(record.place, parts)


def document_of(place: str, parts: Iterable[str]) -> Iterator[Document]:
    """Yields the document of a text in parts; none for an empty text. Half of a character ends the
    iteration of the document's parts with an error.
    """
    rest = iter(parts)
    if first := next(rest, ""):
        yield Document(place=place, parts=_checked(place, first, rest))


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


def _text_record(path: Path, encoding: str, read: CountBytes, only: str | None) -> Iterator[Record]:
    del only
    with closing(decoded(path, encoding, read)) as parts:
        yield Record(path=path, parts=parts)
        for _ in parts:  # the rest of a record that its user has left is checked, too
            pass


_READERS: Mapping[str, Reader] = {
    **dict.fromkeys(PLAIN_TEXT, _text_record),
    ".jsonl": json_lines,
    ".json": json_objects,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}
"""Formats of files and their readers."""
