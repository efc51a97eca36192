"""The documents of text files, and writing them as a token file. No torch.

A token file is ids of one width, little-endian, every document followed by the end token. Text is
decoded strictly: a byte that is no character ends preparation with the file and the byte's offset.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.sources import Source
from penstock.models.data.tokenizer import Tokenizer
from penstock.protocol.config.values import UTF8
from penstock.protocol.errors import ConfigError, reason
from penstock.protocol.run.files import cannot_write

_PIECE_BYTES = 1 << 20
_MARK = "\ufeff"
_MARKS = (
    # The mark of UTF-32 begins with that of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32", ("utf-32", "utf-32-le")),
    (codecs.BOM_UTF32_BE, "utf-32", ("utf-32", "utf-32-be")),
    (codecs.BOM_UTF16_LE, "utf-16", ("utf-16", "utf-16-le")),
    (codecs.BOM_UTF16_BE, "utf-16", ("utf-16", "utf-16-be")),
    (codecs.BOM_UTF8, UTF8, (UTF8, "utf-8-sig")),
)
"""Byte order marks: bytes, encoding that they mean, and codecs that read them as a mark."""

_MARKLESS = {"utf-8-sig": UTF8, "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
"""Codecs that write a mark -> codecs that write none and as many bytes a character."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text in UTF-8, and the file, or the line of a file, that it is from."""

    text: bytes
    place: str


def documents(source: Source) -> Iterator[Document]:
    """Yields documents: each file is one, in .jsonl files the ``text`` of each line. Empty ones are
    left out.

    A byte order mark at the start of a file is no part of its text; ends of lines stay as they are.

    Raises:
        ConfigError: a file that cannot be read or is in another encoding, or a line without text.
    """
    for path in source.files:
        read = _json_lines if path.suffix == ".jsonl" else _whole
        try:
            yield from read(path, source.encoding)
        except OSError as error:
            raise ConfigError(f"data: cannot read {path}: {reason(error)}") from error


def token_dtype(vocab_size: int) -> str:
    """Returns the type of ids in a token file: ``uint16`` where every id fits, else ``uint32``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_tokens(
    texts: Iterable[Document],
    tokenizer: Tokenizer,
    path: Path,
    hasher: ChunkHasher,
    *,
    vocab_size: int,
) -> int:
    """Write a token file; returns its number of tokens. The file is on disk when this returns.

    Each document is its ids in little-endian :func:`token_dtype`, then the end token. ``hasher``
    takes every byte of the file. ``vocab_size`` is the model's.

    Raises:
        CapacityError, ConfigError: it cannot be written, or a text has a token that the model has
            not.
    """
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    count = 0
    try:
        with path.open("wb") as file:
            for text in texts:
                encoded = tokenizer.encode(text.text)
                _check_ids(encoded, text.place, vocab_size)
                ids = np.append(encoded, np.uint32(tokenizer.eos)).astype(dtype)
                count += len(ids)
                content = ids.tobytes()
                file.write(content)
                hasher.update(content)
            # On disk before meta.json can say that it is whole.
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error, count * dtype.itemsize) from error
    return count


def _check_ids(ids: NDArray[np.uint32], place: str, vocab_size: int) -> None:
    """Refuse a token without a row in the model. Tokenizers of published models may have such
    tokens, which no text uses.
    """
    if len(ids) and int(ids.max()) >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        raise ConfigError(
            f"{place}: token {first} of the text has id {ids[first]}, and the model has a"
            f" vocabulary of {vocab_size}; take that token out of the text, or give a tokenizer"
            " that goes with the model (data.tokenizer)"
        )


def _whole(path: Path, encoding: str) -> Iterator[Document]:
    text = "".join(_pieces(path, encoding))
    if text:
        yield Document(_encoded(text, str(path)), str(path))


def _json_lines(path: Path, encoding: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(path, encoding), start=1):
        if not line or line.isspace():
            continue
        place = f"{path}, line {number}"
        try:
            # Files that were put together may have a mark at the start of each.
            text = _encoded(json.loads(line.removeprefix(_MARK))["text"], place)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f'{place}: expected a JSON object such as {{"text": "…"}}') from error
        if text:
            yield Document(text, place)


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """Yields the lines of a file without their ends; only a line feed ends a line."""
    parts: list[str] = []
    for piece in _pieces(path, encoding):
        first, *others = piece.split("\n")
        parts.append(first)
        for other in others:
            yield "".join(parts)
            parts = [other]
    yield "".join(parts)


def _encoded(text: str, place: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: character {error.start} of the text is {text[error.start]!a}, half of a"
            " surrogate pair, which is no character"
        ) from error


def _pieces(path: Path, encoding: str) -> Iterator[str]:
    """Yields the text of a file in pieces, without a byte order mark at its start.

    Raises:
        ConfigError: a byte that is no character of the encoding, a mark of another encoding, or
            the character 0, which no text has; names the file and the offset.
    """
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    offset = 0
    with path.open("rb") as file:
        while True:
            content = file.read(_PIECE_BYTES)
            # The decoder holds the bytes of a character that the last piece ended in.
            start = offset - len(decoder.getstate()[0])
            mark_bytes = _mark_bytes(path, content, encoding) if offset == 0 else 0
            try:
                text = decoder.decode(content, not content)
            except UnicodeError as error:
                place = start + getattr(error, "start", 0)
                raise _undecodable(path, place, encoding, error) from error
            text = text.removeprefix(_MARK) if mark_bytes else text
            if "\0" in text:
                before = text[: text.index("\0")].encode(_MARKLESS.get(encoding, encoding))
                raise _not_text(path, start + mark_bytes + len(before), encoding, content)
            yield text
            offset += len(content)
            if not content:
                return


def _mark_bytes(path: Path, head: bytes, encoding: str) -> int:
    """Returns the length of the byte order mark at the start of a file; 0 where there is none.

    Raises:
        ConfigError: the mark, or the order of bytes, is that of another encoding.
    """
    for mark, meaning, codecs_of_mark in _MARKS:
        if head.startswith(mark) and encoding in codecs_of_mark:
            return len(mark)
        if head.startswith(mark):
            raise ConfigError(
                f"{path}: begins with the byte order mark of {meaning} ({mark.hex(' ')} at offset"
                f" 0), and data.encoding is {encoding}: set data.encoding to {meaning}, or convert"
                " the file"
            )
    if encoding in ("utf-16", "utf-32") and head:
        raise ConfigError(
            f"{path}: has no byte order mark at offset 0, and data.encoding is {encoding}: set"
            f" data.encoding to {encoding}-le or {encoding}-be"
        )
    likely = _wide_encoding(head)
    if encoding.startswith(("utf-16", "utf-32")) and likely not in (None, encoding):
        raise ConfigError(
            f"{path}: the zeros from offset 0 on are those of {likely}, and data.encoding is"
            f" {encoding}: set data.encoding to {likely}, or convert the file"
        )
    return 0


def _wide_encoding(content: bytes) -> str | None:
    """Returns the encoding of two or four bytes a character that the places of zeros suggest."""
    head = content[: 1 << 12]
    zeros = tuple(head[place::4].count(0) * 8 > len(head) for place in range(4))
    suggested: dict[tuple[bool, ...], str] = {
        (False, True, False, True): "utf-16-le",
        (True, False, True, False): "utf-16-be",
        (False, False, True, True): "utf-32-le",
        (True, True, False, False): "utf-32-be",
        (False, True, True, True): "utf-32-le",
        (True, True, True, False): "utf-32-be",
    }
    return suggested.get(zeros)


def _undecodable(path: Path, offset: int, encoding: str, error: UnicodeError) -> ConfigError:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)
    seen = f"byte 0x{byte.hex()} at offset {offset:,}" if byte else f"the end, offset {offset:,},"
    why = f" ({error.reason})" if isinstance(error, UnicodeDecodeError) else ""
    return ConfigError(
        f"{path}: {seen} is no {encoding}{why}; convert the file to {encoding}, or set"
        " data.encoding to what all files of text are in, such as latin-1 or utf-16"
    )


def _not_text(path: Path, offset: int, encoding: str, content: bytes) -> ConfigError:
    """Returns the error for a character 0 at ``offset``, which is in ``content``."""
    likely = _wide_encoding(content)
    advice = (
        f"the zeros are those of {likely}: set data.encoding to {likely}, or convert the file"
        if likely
        else "it may be binary, or text in an encoding such as utf-16-le (data.encoding)"
    )
    return ConfigError(
        f"{path}: byte 0x00 at offset {offset:,} is a character that no text in {encoding} has;"
        f" {advice}"
    )
