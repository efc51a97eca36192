"""Streams files in the safetensors format to and from shared memory.

The format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range),
then the tensors' bytes. The safetensors library needs a private copy of every tensor. This module
needs one chunk of memory for a block of any size, and computes the checksum while it copies.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np

from penstock.daemons.memory.disk import Disk
from penstock.daemons.memory.machine.events import WrittenFile
from penstock.host.errors import StateError
from penstock.protocol.run.saved_base import file_header
from penstock.shm.memory import Halves

CHUNK_BYTES = 8 << 20
MAX_HEADER_BYTES = 64 << 20
_CHUNK_FLOATS = CHUNK_BYTES // 4
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class CancelledError(Exception):
    """The caller's ``cancelled`` said so."""


class DamagedError(StateError):
    """A file is not what was written: missing, cut short, or with other bytes. An older saved state
    may be whole.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """A tensor's type and its place in memory. ``dtype``: ``F32``, ``BF16`` or ``F16``. An F32
    tensor may be split into two halves in memory; in a file it is whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | Halves

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return len(self.data) * (ITEM_BYTES[self.dtype] if isinstance(self.data, Halves) else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """One tensor of a file; ``start`` counts bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def write_tensors(
    file: BinaryIO,
    name: str,
    tensors: Sequence[TensorBytes],
    cancelled: Callable[[], bool],
    disk: Disk,
) -> WrittenFile:
    """Writes a file, without forcing it to disk.

    Raises:
        OSError: it cannot be written.
        CancelledError: on request.
    """
    return _through(name, tensors, cancelled, lambda piece: disk.write(file, piece))


def digest_of(
    name: str, tensors: Sequence[TensorBytes], cancelled: Callable[[], bool]
) -> WrittenFile:
    """Returns size and checksum of the file that :func:`write_tensors` would write.

    Raises:
        CancelledError: on request.
    """
    return _through(name, tensors, cancelled, lambda piece: None)


def file_bytes(tensors: Sequence[TensorBytes]) -> int:
    """Returns the size of the file that :func:`write_tensors` would write."""
    return len(_header(tensors)) + sum(tensor.num_bytes for tensor in tensors)


def _through(
    name: str,
    tensors: Sequence[TensorBytes],
    cancelled: Callable[[], bool],
    take: Callable[[memoryview], None],
) -> WrittenFile:
    """Hands the pieces of a file to ``take``, one by one."""
    digest = hashlib.sha256()
    num_bytes = 0
    pieces = chain([memoryview(_header(tensors))], _pieces(tensor.data for tensor in tensors))
    for piece in pieces:
        if cancelled():
            raise CancelledError
        take(piece)
        digest.update(piece)
        num_bytes += len(piece)
    return WrittenFile(name=name, num_bytes=num_bytes, sha256=digest.hexdigest())


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Returns the tensors of a file, with every byte range checked against the file's size.

    Raises:
        DamagedError: missing, cut short, or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise DamagedError(f"{path}: cut short, or not a safetensors file ({size} bytes)")
            fields = json.loads(file.read(length))
    except OSError as error:
        raise DamagedError(f"{path}: cannot read it: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: its header is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise DamagedError(f"{path}: its header is damaged: not a JSON object")
    fields.pop("__metadata__", None)
    places = {name: _place(path, name, entry, 8 + length) for name, entry in fields.items()}
    end = max((p.start + p.num_bytes for p in places.values()), default=8 + length)
    if end != size:
        raise DamagedError(f"{path}: has {size} bytes, its header promises {end}: cut short?")
    return places


def read_into(file: BinaryIO, place: TensorPlace, out: memoryview | Halves) -> None:
    """Copies one tensor's bytes into ``out``, which has its size.

    Raises:
        EOFError: the file became shorter than its header says.
    """
    file.seek(place.start)
    if not isinstance(out, Halves):
        _fill(file, out)
        return
    for start in range(0, len(out), _CHUNK_FLOATS):
        values = np.empty(min(_CHUNK_FLOATS, len(out) - start), dtype=np.float32)
        _fill(file, values.data.cast("B"))
        out.store(values, start)


def _fill(file: BinaryIO, out: memoryview) -> None:
    position = 0
    while position < len(out):
        count = file.readinto(out[position : position + CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"file ends {len(out) - position} bytes early")
        position += count


def sha256_of(path: Path, cancelled: Callable[[], bool]) -> str:
    """Returns the hex digest of a file.

    Raises:
        CancelledError: on request.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if cancelled():
                raise CancelledError
            digest.update(buffer[:count])
    return digest.hexdigest()


def _header(tensors: Sequence[TensorBytes]) -> bytes:
    return file_header((each.name, each.dtype, each.shape, each.num_bytes) for each in tensors)


def _pieces(buffers: Iterable[memoryview | Halves]) -> Iterable[memoryview]:
    for buffer in buffers:
        if isinstance(buffer, Halves):
            for start in range(0, len(buffer), _CHUNK_FLOATS):
                yield buffer.load(start, start + _CHUNK_FLOATS).data.cast("B")
        else:
            for start in range(0, len(buffer), CHUNK_BYTES):
                yield buffer[start : start + CHUNK_BYTES]


def _place(path: Path, name: str, entry: object, data_start: int) -> TensorPlace:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])  # type: ignore[index]
        start, end = entry["data_offsets"]  # type: ignore[index]
        num_bytes = ITEM_BYTES[dtype]
        for number in (start, end, *shape):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is not a size")
        for extent in shape:
            num_bytes *= extent
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path}: header entry {name!r} is damaged: {error!r}") from error
    if end - start != num_bytes:
        raise DamagedError(f"{path}: {name!r} has {end - start} bytes, its shape needs {num_bytes}")
    return TensorPlace(dtype=dtype, shape=shape, start=data_start + start, num_bytes=num_bytes)
