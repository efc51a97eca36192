"""Where training text comes from, and writing it as a token file. No torch.

Sources: ``@stdlib`` (the source and text files of Python's standard library, which every machine
has), a file, or a glob of text and JSON-lines files. A token file is ids of one width,
little-endian, every document followed by the end token.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.tokenizer import Tokenizer
from penstock.protocol.errors import ConfigError
from penstock.protocol.run.files import cannot_write

STDLIB = "@stdlib"
MAX_STDLIB_BYTES = 30 * 10**6

_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def source_files(source: str, *, key: str = "data.path") -> list[Path]:
    """Returns the files of a source in a fixed order.

    Raises:
        ConfigError: there is no file, or one of a kind that is not read.
    """
    if source == STDLIB:
        return _stdlib_files()
    if source.startswith("@"):
        raise ConfigError(f"{key} = {source!r}: unknown source; the only one is {STDLIB}")
    path = Path(source)
    if path.is_dir():
        found = [p for suffix in _SUFFIXES for p in path.rglob(f"*{suffix}")]
    else:
        found = [Path(name) for name in glob.glob(source, recursive=True)]
    files = sorted(p for p in found if p.is_file())
    if not files:
        raise ConfigError(f"{key} = {source!r}: matches no file; give a file or a glob of files")
    strange = next((p for p in files if p.suffix not in _SUFFIXES), None)
    if strange is not None:
        raise ConfigError(
            f"{key} = {source!r}: {strange} is none of {', '.join(_SUFFIXES)}; token files go to"
            " data.tokens"
        )
    return files


def documents(files: Iterable[Path]) -> Iterator[bytes]:
    """Yields UTF-8 documents: each file is one, in .jsonl files the ``text`` of each line. Empty
    ones are left out.

    Raises:
        ConfigError: a file that cannot be read, or a line without text.
    """
    for path in files:
        try:
            if path.suffix == ".jsonl":
                yield from _json_lines(path)
            else:
                content = path.read_bytes()
                if content:
                    yield content
        except OSError as error:
            raise ConfigError(f"data: cannot read {path}: {error.strerror}") from error


def token_dtype(vocab_size: int) -> str:
    """Returns the type of ids in a token file: ``uint16`` where every id fits, else ``uint32``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_tokens(
    texts: Iterable[bytes], tokenizer: Tokenizer, path: Path, hasher: ChunkHasher
) -> int:
    """Write a token file; returns its number of tokens. The file is on disk when this returns.

    Each document is its ids in little-endian :func:`token_dtype`, then the end token. ``hasher``
    takes every byte of the file.

    Raises:
        CapacityError, ConfigError: it cannot be written.
    """
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    count = 0
    try:
        with path.open("wb") as file:
            for text in texts:
                ids = np.append(tokenizer.encode(text), np.uint32(tokenizer.eos)).astype(dtype)
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


def _stdlib_files() -> list[Path]:
    """Returns the standard library's files without tests and installed packages, of at most 30
    MB.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith((".py", ".txt"))]
    files = sorted(p for p in found if p.is_file())
    if not files:
        raise ConfigError(
            f"data.path = {STDLIB!r}: {root} has no source files; give a file or a glob"
        )
    totals = itertools.accumulate(p.stat().st_size for p in files)
    return [p for p, total in zip(files, totals, strict=True) if total <= MAX_STDLIB_BYTES]


def _json_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"].encode("utf-8", errors="replace")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f'{path}, line {number}: expected a JSON object such as {{"text": "…"}}'
                ) from error
            if text:
                yield text
