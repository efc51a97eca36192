"""The file ``.metadata`` of torch.distributed.checkpoint: names, shapes, and places of chunks.

A tensor is saved in chunks, one by each rank. A chunk is a file of ``torch.save`` inside a
``*.distcp`` file. ``.metadata`` is a pickle, which :mod:`~penstock.models.exchange.pickles` reads.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.pickles import (
    PickledTensor,
    expect,
    expect_list,
    load_pickle,
    load_torch,
)
from penstock.models.exchange.unpickler import StandIn

METADATA = ".metadata"
_COPY = "copy the checkpoint again"
_PRIME = 2**127 - 1
_MOST, _MOST_AXES = 2**63 - 1, 64
"""Largest size, and most axes of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Bytes of a file; ``file`` is relative to the checkpoint."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a tensor, and its place."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedTensor:
    """A tensor of a checkpoint. Its chunks cover each element once."""

    folder: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in files."""
        return sum(chunk.place.length for chunk in self.chunks)

    def files(self, path: Path) -> str:
        """Returns the files of the chunks, relative to ``path`` and separated by commas."""
        folder = self.folder.relative_to(path)
        return ", ".join(sorted({str(folder / chunk.place.file) for chunk in self.chunks}))

    def load(self) -> torch.Tensor:
        """Returns the tensor, over the mapped file if a single chunk holds all.

        Raises:
            StateError: a file is damaged, or holds another tensor; names the file.
        """
        if len(self.chunks) == 1:
            return self._read(self.chunks[0])
        whole = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            part = whole
            for axis, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(axis, start, size)
            part.copy_(self._read(chunk))
        return whole

    def _read(self, chunk: Chunk) -> torch.Tensor:
        place = chunk.place
        path = self.folder / place.file
        value = expect(
            load_torch(path, offset=place.offset, length=place.length),
            PickledTensor,
            path,
            self.key,
        )
        if value.shape != chunk.sizes or value.dtype is not self.dtype:
            raise StateError(
                f"{path}: {self.key} is a tensor of {value.dtype} and shape {list(value.shape)},"
                f" {METADATA} says {self.dtype} and {list(chunk.sizes)}; {_COPY}"
            )
        return value.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors and the values of a checkpoint, by the path of keys that leads to each, such as
    ``("optimizer", "state.lm_head.weight.step")``.
    """

    folder: Path
    tensors: Mapping[tuple[str, ...], ChunkedTensor]
    values: Mapping[tuple[str, ...], Slice]


class Values:
    """A reader of small values. Equal bytes are interpreted once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[bytes, Any] = {}

    def read(self, place: Slice) -> Any:
        """Returns the value at a place.

        Raises:
            StateError: the file is damaged; names it.
        """
        path = self._folder / place.file
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
        except OSError as error:
            raise StateError(f"{path}: {error}; {_COPY}") from error
        if content not in self._known:
            self._known[content] = load_torch(path, offset=place.offset, length=place.length)
        return self._known[content]


def read_contents(folder: Path) -> Contents:
    """Reads ``.metadata`` and compares the sizes of all files.

    Raises:
        ConfigError: the checkpoint has compressed chunks, or was saved by a planner of its own.
        StateError: a file is missing, truncated or damaged, or chunks are missing or overlap.
    """
    path = folder / METADATA
    fields = _attributes(load_pickle(path), path, "the metadata")
    described = expect(fields.get("state_dict_metadata"), dict, path, "state_dict_metadata")
    stored = expect(fields.get("storage_data"), dict, path, "storage_data")
    paths = fields.get("planner_data")
    if not isinstance(paths, dict):
        raise ConfigError(
            f"{path}: has no planner_data, which divides keys into names; save the checkpoint with"
            " the default planner of torch.distributed.checkpoint"
        )
    places: dict[tuple[str, str | None], Slice] = {}
    for index, info in stored.items():
        place = _attributes(index, path, "an index")
        offset = place.get("offset")
        start = None if offset is None else _text_of(_sizes(offset, path))
        places[expect(place.get("fqn"), str, path, "a key"), start] = _slice(info, path)
    tensors: dict[tuple[str, ...], ChunkedTensor] = {}
    values: dict[tuple[str, ...], Slice] = {}
    for key, value in described.items():
        name = expect(key, str, path, "a key")
        keys = tuple(str(part) for part in expect_list(paths.get(name, [name]), path, name))
        if not keys:
            raise StateError(f"{path}: has no path of {name}; {_COPY}")
        kind = value.name.rpartition(".")[2] if isinstance(value, StandIn) else ""
        if kind == "TensorStorageMetadata":
            tensors[keys] = _tensor(folder, name, _attributes(value, path, name), places)
        elif kind == "BytesStorageMetadata" and (name, None) in places:
            values[keys] = places[name, None]
        else:
            raise StateError(f"{path}: has no place of {name}; {_COPY}")
    _check_files(folder, places.values())
    return Contents(folder=folder, tensors=tensors, values=values)


def _attributes(value: Any, path: Path, name: str) -> Mapping[str, Any]:
    return expect(value, StandIn, path, name).attributes


def _sizes(value: Any, path: Path) -> tuple[int, ...]:
    sizes = expect_list(value, path, "a size")
    numbers = tuple(expect(size, int, path, "a size") for size in sizes)
    if not all(0 <= number <= _MOST for number in numbers):
        raise StateError(f"{path}: has a size that is negative, or of over 63 bits; {_COPY}")
    if len(numbers) > _MOST_AXES:
        raise StateError(f"{path}: has a tensor of over {_MOST_AXES} axes; {_COPY}")
    return numbers


def _text_of(offsets: Sequence[int]) -> str:
    """Returns offsets as a key. A stranger can choose numbers with hashes that collide."""
    return ",".join(map(str, offsets))


def _slice(value: Any, path: Path) -> Slice:
    fields = _attributes(value, path, "a place")
    file = expect(fields.get("relative_path"), str, path, "relative_path")
    if fields.get("transform_descriptors"):
        raise ConfigError(
            f"{path}: chunks are compressed or encrypted; save the checkpoint without extensions"
        )
    parts = PurePosixPath(file).parts
    if not parts or ".." in parts or PurePosixPath(file).is_absolute() or "\0" in file:
        raise StateError(f"{path}: names the file {file!r} outside of the checkpoint; {_COPY}")
    offset, length = _sizes([fields.get("offset"), fields.get("length")], path)
    return Slice(file=file, offset=offset, length=length)


def _tensor(
    folder: Path,
    key: str,
    fields: Mapping[str, Any],
    places: Mapping[tuple[str, str | None], Slice],
) -> ChunkedTensor:
    path = folder / METADATA
    shape = _sizes(fields.get("size"), path)
    properties = expect(fields.get("properties"), StandIn, path, key).state
    if isinstance(properties, dict):
        dtype = properties.get("dtype")
    else:
        dtype = next(iter(expect_list(properties, path, key)), None)
    dtype = expect(dtype, torch.dtype, path, f"the type of {key}")
    chunks = []
    for part in expect_list(fields.get("chunks"), path, key):
        chunk = _attributes(part, path, key)
        offsets, sizes = _sizes(chunk.get("offsets"), path), _sizes(chunk.get("sizes"), path)
        if (key, _text_of(offsets)) not in places:
            raise StateError(f"{path}: has no place of the chunk {list(offsets)} of {key}; {_COPY}")
        place = places[key, _text_of(offsets)]
        if math.prod(sizes) * dtype.itemsize > place.length:
            raise StateError(f"{path}: a chunk of {key} is larger than its place; {_COPY}")
        chunks.append(Chunk(offsets=offsets, sizes=sizes, place=place))
    check_chunks(path, key, shape, chunks)
    return ChunkedTensor(
        folder=folder,
        key=key,
        dtype=dtype,
        shape=shape,
        chunks=tuple(chunks),
    )


def check_chunks(path: Path, key: str, shape: Sequence[int], chunks: Sequence[Chunk]) -> None:
    """Checks that chunks cover each element of a tensor once.

    Raises:
        StateError: a chunk is missing, overlaps another or is too large; names ``path``.
    """
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise StateError(f"{path}: {key} has chunks of another number of axes; {_COPY}")
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise StateError(
                f"{path}: {key} has shape {list(shape)}, and a chunk that ends at {ends}; {_COPY}"
            )
    covered, whole = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if covered < whole:
        raise StateError(
            f"{path}: chunks of {key} are missing: {covered} of {whole} numbers are saved; copy the"
            " files of all ranks"
        )
    if covered > whole or not _are_apart(shape, chunks):
        raise StateError(f"{path}: chunks of {key} overlap; {_COPY}")


def _are_apart(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Returns whether chunks with as many elements as a tensor cover each element once.

    An element at (i, j, ...) stands for the monomial x**i * y**j * ..., and a box of elements for a
    product of geometric sums. The chunks are apart exactly if their polynomials add up to the whole
    tensor's. They are compared at a random point modulo a prime (Schwartz-Zippel lemma): different
    polynomials agree there with a probability below 2**-60. So the time is linear in the chunks.
    """
    if len(chunks) < 2:
        return True
    points = [2 + secrets.randbelow(_PRIME - 2) for _ in shape]
    inverses = [pow(point - 1, -1, _PRIME) for point in points]

    def value(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for start, size, point, inverse in zip(offsets, sizes, points, inverses, strict=True):
            row = pow(point, start, _PRIME) * (pow(point, size, _PRIME) - 1) * inverse
            product = product * row % _PRIME
        return product

    total = sum(value(chunk.offsets, chunk.sizes) for chunk in chunks) % _PRIME
    return total == value([0] * len(shape), shape)


def _check_files(folder: Path, places: Iterable[Slice]) -> None:
    """Checks that each file exists and is long enough."""
    by_file = sorted(places, key=lambda place: place.file)
    for file, parts in itertools.groupby(by_file, key=lambda place: place.file):
        path, needed = folder / file, max(part.offset + part.length for part in parts)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StateError(
                f"{path}: is missing, and {METADATA} names it; copy the files of all ranks"
            ) from error
        if size < needed:
            raise StateError(
                f"{path}: is truncated: it has {size} bytes, {METADATA} names {needed}; {_COPY}"
            )
