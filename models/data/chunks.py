"""Checksums of token files by chunk. Preparation writes them; a process checks a chunk at its first
read.

``data/<split>.sums`` holds the first 16 bytes of each chunk's SHA-256, one after another.
``data/meta.json`` holds the size of chunks and the checksum of the ``.sums`` file. Chunks are small
because shuffled sequences lie anywhere: to read a sequence means to read its chunk.

A token file that Penstock writes is hashed during the write (:class:`ChunkHasher`). So its
checksums are those of the intended bytes, and the file is not read again. A token file of the user
is read once (:func:`write_sums`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.host.errors import StateError
from penstock.host.limits.cgroup import usable_cpus

CHUNK_BYTES = 1 << 16
"""Bytes that share a checksum; the last chunk of a file may be shorter."""

SAY_EVERY_S = 5.0
"""Seconds between two lines about work that takes long."""

_DIGEST_BYTES = 16
_SLAB_CHUNKS = 256
_MAX_THREADS = 8

_REMEDY = "Restore it and start again; for other data start a new run in another run.dir"
_REMEDY_OWN = (
    "Restore it, or delete {} and start again, which makes it from the same text; for another text"
    " start a new run in another run.dir"
)

Bytes = NDArray[np.uint8]
Progress = Callable[[str], None]


class ChunkHasher:
    """Takes the bytes of a file in order, in pieces of any size, and keeps a digest per chunk."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._chunk = hashlib.sha256()
        self._num_bytes = 0

    def update(self, content: bytes) -> None:
        """Takes the next bytes of the file."""
        rest = memoryview(content)
        while rest:
            part = rest[: CHUNK_BYTES - self._num_bytes % CHUNK_BYTES]
            self._chunk.update(part)
            self._num_bytes += len(part)
            rest = rest[len(part) :]
            if self._num_bytes % CHUNK_BYTES == 0:
                self._close_chunk()

    def write(self, sums: Path) -> dict[str, Any]:
        """Writes the checksums of all bytes taken; returns the fields for ``meta.json``.

        The checksums are on disk when this returns. No more bytes may follow.
        """
        if self._num_bytes % CHUNK_BYTES:
            self._close_chunk()
        return _write(b"".join(self._digests), sums, self._num_bytes)

    def _close_chunk(self) -> None:
        self._digests.append(self._chunk.digest()[:_DIGEST_BYTES])
        self._chunk = hashlib.sha256()


def write_sums(
    tokens: Path,
    sums: Path,
    progress: Progress,
    check: Callable[[int, Bytes], None] = lambda start, content: None,
) -> dict[str, Any]:
    """Writes the checksums of the file ``tokens``; returns the fields for ``meta.json``.

    Reads the whole file once, with one thread for each core (at most 8), and reports to
    ``progress`` every few seconds. The checksums are on disk when this returns. ``check`` gets each
    part of the file and its offset; an error of ``check`` ends the reading.
    """
    content = _mapped(tokens)
    slab = _SLAB_CHUNKS * CHUNK_BYTES

    def digests_of(start: int) -> bytes:
        check(start, content[start : start + slab])
        return _digests(content[start : start + slab])

    with ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus())) as pool:
        starts = range(0, len(content), slab)
        digests = []
        said_s = time.monotonic()
        for start, part in zip(starts, pool.map(digests_of, starts), strict=True):
            digests.append(part)
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                progress(f"checksums of {tokens}: {start / 1e9:.1f} of {len(content) / 1e9:.1f} GB")
    return _write(b"".join(digests), sums, len(content))


def _write(digests: bytes, sums: Path, file_bytes: int) -> dict[str, Any]:
    with sums.open("wb") as file:
        file.write(digests)
        file.flush()
        # Before meta.json, which is written last and marks the checksums as complete.
        os.fsync(file.fileno())
    return {
        "path": sums.name,
        "chunk_bytes": CHUNK_BYTES,
        "file_bytes": file_bytes,
        "sha256": hashlib.sha256(digests).hexdigest(),
    }


class Checksums:
    """The checksums of one token file, and the chunks that were checked already.

    ``content`` is the mapped file, uint8 of shape (bytes,); ``digests`` has 16 bytes a chunk.
    """

    def __init__(
        self, path: Path, content: Bytes, digests: bytes, chunk_bytes: int, remedy: str
    ) -> None:
        self._path, self._content, self._remedy = path, content, remedy
        self._digests, self._chunk_bytes = digests, chunk_bytes
        self._checked = bytearray(len(digests) // _DIGEST_BYTES)

    @classmethod
    def open(cls, path: Path, data_dir: Path, entry: dict[str, Any]) -> Checksums:
        """Returns the checksums of the token file ``path``, as ``entry`` of ``meta.json`` describes
        them.

        Raises:
            StateError: the checksums, or the size of the token file, have changed.
            OSError, KeyError, TypeError, ValueError: there are none, or the entry is damaged.
        """
        sums, num_bytes, chunk_bytes = (
            data_dir / entry["path"],
            int(entry["file_bytes"]),
            int(entry["chunk_bytes"]),
        )
        remedy = _REMEDY_OWN.format(data_dir) if path.parent == data_dir else _REMEDY
        digests = sums.read_bytes()
        count = -(-num_bytes // chunk_bytes)
        intact = hashlib.sha256(digests).hexdigest() == entry["sha256"]
        if not intact or len(digests) != count * _DIGEST_BYTES:
            raise StateError(f"{sums}: is damaged or was edited. {remedy}")
        content = _mapped(path)
        if len(content) < num_bytes:
            raise StateError(
                f"{path}: has {len(content)} bytes, {num_bytes} when the run was prepared. {remedy}"
            )
        return cls(path, content[:num_bytes], digests, chunk_bytes, remedy)

    def check(self, start: int, stop: int) -> None:
        """Checks the chunks with bytes ``start`` to ``stop - 1`` of the file that no call has
        checked before.

        Raises:
            StateError: a chunk has changed; the error names the file and the chunk's offset.
        """
        size = self._chunk_bytes
        for chunk in range(start // size, (stop - 1) // size + 1):
            if not self._checked[chunk]:
                self._check(chunk)
                # Only now: a chunk that fails must fail again when it is read again.
                self._checked[chunk] = 1

    def _check(self, chunk: int) -> None:
        start = chunk * self._chunk_bytes
        content = self._content[start : start + self._chunk_bytes]
        place = chunk * _DIGEST_BYTES
        if _digest(content) != self._digests[place : place + _DIGEST_BYTES]:
            raise StateError(
                f"{self._path}: the {len(content)} bytes from offset {start} are not those that the"
                " run was prepared with (their checksum differs): the file is damaged or was"
                f" edited. {self._remedy}"
            )


def _mapped(path: Path) -> Bytes:
    return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, "u1")


def _digests(content: Bytes) -> bytes:
    starts = range(0, len(content), CHUNK_BYTES)
    return b"".join(_digest(content[start : start + CHUNK_BYTES]) for start in starts)


def _digest(content: Bytes) -> bytes:
    return hashlib.sha256(content.data).digest()[:_DIGEST_BYTES]
