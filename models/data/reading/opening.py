"""Content of files in parts, decompressed where the name ends in ``.gz`` or ``.zst``. No torch."""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from penstock.host.errors import ConfigError, reason

CountBytes = Callable[[int], None]
"""Function that takes the number of bytes that were read from a file."""

PIECE_BYTES = 1 << 20
COMPRESSED = (".gz", ".zst")
"""Endings of compressed files."""
MAX_EXPANSION = 100
"""Largest content of a compressed file, in sizes of the file. Texts have some 3 to 30."""
_FREE_BYTES = 1 << 28
"""Largest content of any file."""


def ignore_bytes(count: int) -> None:
    """Counts nothing."""


def pieces(path: Path, read: CountBytes = ignore_bytes) -> Iterator[bytes]:
    """Yields the content of a file in parts of at most :data:`PIECE_BYTES`. Calls ``read`` with
    numbers of bytes of the file itself, which are fewer than those of the parts if it is
    compressed.

    Raises:
        ConfigError: the file is damaged or cut short, its content is too long for a file of its
            size, or its library is missing.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        place = size = 0
        try:
            stream = _STREAMS.get(path.suffix, _plain)(path, file)
            while content := stream.read(PIECE_BYTES):
                size += len(content)
                check_expansion(path, size)
                read(file.tell() - place)
                place = file.tell()
                yield content
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ConfigError(
                f"{path}: cannot be decompressed ({reason(error)}); the file is damaged or cut"
                " short"
            ) from error
        read(file.tell() - place)


def check_expansion(path: Path, num_bytes: int) -> None:
    """Refuses a small file with a content of ``num_bytes`` or more, which no text has.

    Raises:
        ConfigError: the content is too long for the file.
    """
    if num_bytes > _FREE_BYTES and num_bytes > MAX_EXPANSION * path.stat().st_size:
        raise ConfigError(
            f"{path}: has {path.stat().st_size:,} bytes, and a content of at least {num_bytes:,},"
            f" over {MAX_EXPANSION} times as many; if you trust its source, convert it to JSON"
            " lines without compression"
        )


def library(path: Path, name: str) -> Any:
    """Returns a module of pyarrow, which reads the file ``path``.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path}: needs pyarrow, which is not installed (pip install 'penstock[data]')"
        ) from error


def _plain(path: Path, file: IO[bytes]) -> IO[bytes]:
    del path
    return file


def _gzip(path: Path, file: IO[bytes]) -> IO[bytes]:
    del path
    stream: Any = gzip.GzipFile(fileobj=file)
    return cast(IO[bytes], stream)


def _zstd(path: Path, file: IO[bytes]) -> IO[bytes]:
    stream: IO[bytes] = library(path, "pyarrow").input_stream(file, compression="zstd")
    return stream


_STREAMS: Mapping[str, Callable[[Path, IO[bytes]], IO[bytes]]] = {".gz": _gzip, ".zst": _zstd}
"""Endings of compressed files and functions that open them."""
