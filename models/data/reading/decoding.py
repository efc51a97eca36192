"""Strict decoding of text files. A byte that is no character ends the reading with the file and the
byte's offset. No torch.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Generator
from pathlib import Path

from penstock.config.values import UTF8
from penstock.host.errors import ConfigError
from penstock.models.data.reading.opening import COMPRESSED, CountBytes, ignore_bytes, pieces

MARK = "\ufeff"
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


def decoded(path: Path, encoding: str, read: CountBytes = ignore_bytes) -> Generator[str]:
    """Yields the text of a file in pieces, without a byte order mark at its start. Calls ``read``
    with numbers of bytes of the file. Offsets in errors are those of the decompressed content.

    Raises:
        ConfigError: a byte is no character of the encoding, or begins a mark of another one. Or the
            text has the character 0, which no text has, or the file is damaged. The error names the
            file and the offset.
        OSError: the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    name = f"{path} (decompressed)" if path.suffix in COMPRESSED else str(path)
    offset = 0
    for content in itertools.chain(pieces(path, read), [b""]):
        # The decoder holds the bytes of a character that the last piece ended in.
        held = decoder.getstate()[0]
        start = offset - len(held)
        mark_bytes = _mark_bytes(name, content, encoding) if offset == 0 else 0
        try:
            text = decoder.decode(content, not content)
        except UnicodeError as error:
            place = getattr(error, "start", 0)
            byte = (held + content)[place : place + 1]
            raise _undecodable(name, start + place, byte, encoding, error) from error
        text = text.removeprefix(MARK) if mark_bytes else text
        if "\0" in text:
            before = text[: text.index("\0")].encode(_MARKLESS.get(encoding, encoding))
            raise _not_text(name, start + mark_bytes + len(before), encoding, content)
        if text:
            yield text
        offset += len(content)


def _mark_bytes(name: str, head: bytes, encoding: str) -> int:
    """Returns the length of the byte order mark at the start of a file; 0 where there is none.

    Raises:
        ConfigError: the mark, or the order of bytes, is that of another encoding.
    """
    for mark, meaning, codecs_of_mark in _MARKS:
        if head.startswith(mark) and encoding in codecs_of_mark:
            return len(mark)
        if head.startswith(mark):
            raise ConfigError(
                f"{name}: begins with the byte order mark of {meaning} ({mark.hex(' ')} at offset"
                f" 0), and data.encoding is {encoding}: set data.encoding to {meaning}, or convert"
                " the file"
            )
    if encoding in ("utf-16", "utf-32") and head:
        raise ConfigError(
            f"{name}: has no byte order mark at offset 0, and data.encoding is {encoding}: set"
            f" data.encoding to {encoding}-le or {encoding}-be"
        )
    likely = _wide_encoding(head)
    if encoding.startswith(("utf-16", "utf-32")) and likely not in (None, encoding):
        raise ConfigError(
            f"{name}: the zeros from offset 0 on are those of {likely}, and data.encoding is"
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


def _undecodable(
    name: str, offset: int, byte: bytes, encoding: str, error: UnicodeError
) -> ConfigError:
    """Returns the error for a ``byte`` at ``offset``; it is empty at the end of the file."""
    seen = f"byte 0x{byte.hex()} at offset {offset:,}" if byte else f"the end, offset {offset:,},"
    why = f" ({error.reason})" if isinstance(error, UnicodeDecodeError) else ""
    return ConfigError(
        f"{name}: {seen} is no {encoding}{why}; convert the file to {encoding}, or set"
        " data.encoding to the encoding of all text files, such as latin-1 or utf-16"
    )


def _not_text(name: str, offset: int, encoding: str, content: bytes) -> ConfigError:
    """Returns the error for a character 0 at ``offset``, which is in ``content``."""
    likely = _wide_encoding(content)
    advice = (
        f"the zeros are those of {likely}: set data.encoding to {likely}, or convert the file"
        if likely
        else "it may be binary, or text in an encoding such as utf-16-le (data.encoding)"
    )
    return ConfigError(
        f"{name}: byte 0x00 at offset {offset:,} is a character that no text in {encoding} has;"
        f" {advice}"
    )
