"""Records of CSV files: a header row, fields between commas, quotes as RFC 4180 has them. No torch.

A quoted field keeps its line ends.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from penstock.host.errors import ConfigError
from penstock.models.data.reading.decoding import decoded
from penstock.models.data.reading.opening import CountBytes
from penstock.models.data.reading.record import Record, check_columns, shown_name

_MAX_CHARACTERS = 1 << 28
"""Characters of one field or line; a quote without an end would fill all memory."""
_OTHER_SEPARATORS = (";", "\t", "|")
"""Characters between the fields of files that are no CSV for this reader."""


def csv_rows(path: Path, encoding: str, read: CountBytes, only: str | None) -> Iterator[Record]:
    """Yields the records of a CSV file.

    Raises:
        ConfigError: the header lacks the only column, or a row is damaged or has another number
            of fields than the header.
    """
    csv.field_size_limit(_MAX_CHARACTERS)  # 131,072 by default
    with closing(decoded(path, encoding, read)) as parts:
        rows = _rows(path, parts)
        where, header = next(rows, ("", []))
        if header and only is not None:
            check_columns(f"{path}, {where}", header)
        else:
            _check_header(f"{path}, {where}", header)
        for where, row in rows:
            if len(row) != len(header):
                raise ConfigError(
                    f"{path}, {where}: has {len(row):,} fields, and the header has {len(header):,}"
                )
            yield Record(path=path, where=where, fields=dict(zip(header, row, strict=True)))


def _check_header(place: str, header: list[str]) -> None:
    """Refuses a header with a name twice, or without commas between its names.

    Raises:
        ConfigError: the header is such a one.
    """
    if len(set(header)) < len(header):
        raise ConfigError(f"{place}: has two columns of the same name")
    separator = next((mark for mark in _OTHER_SEPARATORS if mark in "".join(header)), None)
    if len(header) == 1 and separator is not None:
        raise ConfigError(
            f"{place}: the header has one column, {shown_name(header[0])}: fields need commas"
            f" between them, not {separator!r}; convert the file, or rename the column"
        )


def _rows(path: Path, parts: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the rows that are not empty, each with the line where it starts."""
    rows = csv.reader(_lines(path, parts), strict=True)
    while True:
        where = f"line {rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ConfigError(f"{path}, {where}: this row is no CSV ({error})") from error
        if row is None:
            return
        if row:
            yield where, row


def _lines(path: Path, parts: Iterable[str]) -> Iterator[str]:
    """Yields lines with their ends; only a line feed ends a line.

    Raises:
        ConfigError: a line is too long.
    """
    begun: list[str] = []
    size, number = 0, 1
    for part in parts:
        *lines, last = part.split("\n")
        for line in lines:
            yield "".join([*begun, line, "\n"])
            begun, size, number = [], 0, number + 1
        begun.append(last)
        size += len(last)
        if size > _MAX_CHARACTERS:
            raise ConfigError(
                f"{path}, line {number}: is longer than {_MAX_CHARACTERS:,} characters; fields need"
                " commas and rows need line ends between them"
            )
    if rest := "".join(begun):
        yield rest
