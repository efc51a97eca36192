"""Records of JSON lines, and of JSON files: an array of objects, or objects one after another.

Both are read in bounded memory: a line, or a window over the text that holds one object. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.host.errors import ConfigError
from penstock.models.data.reading.decoding import MARK, decoded
from penstock.models.data.reading.opening import CountBytes
from penstock.models.data.reading.record import Record, expected, shown_name

EXAMPLE = '{"text": "…"}'

_MAX_CHARACTERS = 1 << 28
"""Characters of one object in a JSON file; a string without an end would fill all memory."""
_MAX_TOKEN = 16
"""Characters of the longest token of JSON that is no string, and more."""
_RUNS = re.compile(r"\n+|[^\n]+")
_SPACE = re.compile(rf"[ \t\r\n{MARK}]*")


class _RepeatedKey(ValueError):
    """An object with a key twice: no reader knows which of the values counts."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of keys and values.

    Raises:
        _RepeatedKey: a key occurs twice.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        last = {key: number for number, (key, _) in enumerate(pairs)}
        repeated = next(key for number, (key, _) in enumerate(pairs) if last[key] > number)
        raise _RepeatedKey(f"an object has the key {shown_name(repeated)} twice; keep one")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def json_lines(
    path: Path, encoding: str, read: CountBytes, only: str | None = None
) -> Iterator[Record]:
    """Yields the records of a file with a JSON object in each line.

    Raises:
        ConfigError: a line is no JSON object.
    """
    with closing(decoded(path, encoding, read)) as parts:
        for number, line in _lines(path, parts):
            if line.isspace():
                continue
            where = f"line {number}"
            try:
                # Files that were put together may have a mark at the start of each.
                fields = _DECODER.decode(line.removeprefix(MARK))
            except (ValueError, RecursionError, MemoryError) as error:
                raise expected(f"{path}, {where}", EXAMPLE, _cause(error)) from error
            if not isinstance(fields, dict):
                raise expected(f"{path}, {where}", EXAMPLE)
            yield Record(path=path, where=where, fields=fields)


def json_objects(
    path: Path, encoding: str, read: CountBytes, only: str | None = None
) -> Iterator[Record]:
    """Yields the records of a JSON file.

    Raises:
        ConfigError: the file is no array of JSON objects, and no objects one after another.
    """
    with closing(decoded(path, encoding, read)) as parts:
        window = _Window(path, parts)
        if window.next_character() == "[":
            window.skip()
            yield from _of_array(window)
            return
        while window.next_character():
            where = f"line {window.line}"
            yield Record(path=path, where=where, fields=window.take_object(where))


def _of_array(window: _Window) -> Iterator[Record]:
    """Yields the records of an array after its opening bracket, and checks that nothing follows the
    array.
    """
    number = 0
    more = window.next_character() != "]"
    while more:
        number += 1
        window.next_character()
        where = f"line {window.line}, record {number:,}"
        yield Record(path=window.path, where=where, fields=window.take_object(where))
        separator = window.next_character()
        if separator not in (",", "]"):
            seen = ascii(separator) if separator else "the end of the file"
            raise ConfigError(f"{window.path}, {where}: expected , or ] and found {seen}")
        if more := separator == ",":
            window.skip()
    window.skip()
    if window.next_character():
        raise ConfigError(
            f"{window.path}, line {window.line}: text follows the end of the JSON array"
        )


class _Window:
    """A window over the text of a file, which grows until it holds one object."""

    def __init__(self, path: Path, parts: Iterator[str]) -> None:
        self.path, self.line = path, 1
        self._parts = parts
        self._text, self._place = "", 0

    def next_character(self) -> str:
        """Skips white space and returns the character behind it; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._place)
            assert space is not None
            self._advance(space.end())
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._grow():
                return ""

    def skip(self) -> None:
        """Skips one character."""
        self._advance(self._place + 1)

    def take_object(self, where: str) -> dict[str, Any]:
        """Returns the object at this place in the text.

        Raises:
            ConfigError: the place has no JSON object, or one that is too long.
        """
        place = f"{self.path}, {where}"
        if self.next_character() != "{":
            raise expected(place, EXAMPLE)
        while True:
            try:
                fields, end = _DECODER.raw_decode(self._text, self._place)
            except (ValueError, RecursionError, MemoryError) as error:
                if not self._is_cut(error):
                    raise expected(place, EXAMPLE, _cause(error)) from error
                if len(self._text) - self._place > _MAX_CHARACTERS:
                    raise _too_long(place) from error
                if not self._grow():
                    raise ConfigError(f"{place}: the file ends within this record") from error
                continue
            self._advance(end)
            assert isinstance(fields, dict)
            return fields

    def _is_cut(self, error: Exception) -> bool:
        """Returns whether text behind the window can repair an error."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or (
            error.pos >= len(self._text) - _MAX_TOKEN
        )

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._place, end)
        self._place = end

    def _grow(self) -> bool:
        """Adds parts to the window and drops the text before its place. Returns False at the end of
        the file.
        """
        rest = self._text[self._place :]
        added, size = [rest], 0
        # Each attempt reads an object from its start: doubling keeps the time linear.
        while size <= len(rest) and (part := next(self._parts, None)) is not None:
            added.append(part)
            size += len(part)
        self._text, self._place = "".join(added), 0
        return size > 0


def _cause(error: Exception) -> str:
    """Returns the cause of an error of the JSON library, without its places in a part of a file."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    if isinstance(error, _RepeatedKey):
        return str(error)
    if isinstance(error, MemoryError):
        return "it takes more memory than there is"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"


def _lines(path: Path, parts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields the lines that are not empty, without their ends, by number from 1. Only a line feed
    ends a line. Gigabytes of empty lines take seconds.

    Raises:
        ConfigError: a line is too long.
    """
    begun: list[str] = []
    size, number = 0, 1
    for part in parts:
        for run in _RUNS.findall(part):
            if run[0] != "\n":
                begun.append(run)
                size += len(run)
                continue
            if begun:
                yield number, "".join(begun)
                begun, size = [], 0
            number += len(run)
        if size > _MAX_CHARACTERS:
            raise _too_long(f"{path}, line {number}")
    if begun:
        yield number, "".join(begun)


def _too_long(place: str) -> ConfigError:
    return ConfigError(
        f"{place}: is longer than {_MAX_CHARACTERS:,} characters, or a string in it has no end;"
        " give each record a line or an object of its own"
    )
