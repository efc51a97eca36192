"""Weights in safetensors of each rank, as torch's HuggingFaceStorageWriter saves them.

Each file has a part of a tensor. Its header names the place of the part in ``DCP_SHARDING_INFO``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from penstock.host.errors import StateError
from penstock.host.files import DAMAGED, is_file, parse_json
from penstock.models.checkpoints.mapped import TYPES, MappedFile
from penstock.models.exchange.dcp.metadata import Chunk, ChunkedTensor, Slice, check_chunks
from penstock.models.exchange.pickles import expect, expect_list

_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class ShardedWeight(ChunkedTensor):
    """A tensor with its parts in safetensors."""

    __slots__ = ()

    def _read(self, chunk: Chunk) -> torch.Tensor:
        path = self.folder / chunk.place.file
        return _opened(path).tensor(self.key)


def sharded_weights(folder: Path) -> dict[str, ShardedWeight]:
    """Returns the tensors by name, from the headers of all files of a folder.

    Raises:
        StateError: a file is damaged, or parts are missing or overlap; names the file.
    """
    parts: dict[str, list[tuple[Chunk, str]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = _opened(path)
        places = _places(path, file.metadata)
        for name, (dtype, sizes, start) in file.entries.items():
            if dtype not in TYPES:
                raise StateError(f"{path}: {name} is of type {dtype}, which torch does not read")
            offsets = _offsets(path, name, places, len(sizes))
            length = TYPES[dtype].itemsize * torch.Size(sizes).numel()
            place = Slice(file=path.name, offset=start, length=length)
            chunk = Chunk(offsets=offsets, sizes=sizes, place=place)
            parts.setdefault(name, []).append((chunk, dtype))
    return {name: _weight(folder, name, listed) for name, listed in parts.items()}


def _opened(path: Path) -> MappedFile:
    is_file(path)  # to open a FIFO would wait; MappedFile reports a missing file
    try:
        return MappedFile(path)
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: is damaged: {error}; copy the checkpoint again") from error


def _places(path: Path, metadata: Mapping[str, str]) -> dict[Any, Any]:
    """Returns the description of the parts by tensor; empty: the file has whole tensors."""
    try:
        return expect(parse_json(metadata.get(_PLACES, "{}")), dict, path, _PLACES)
    except DAMAGED as error:
        raise StateError(f"{path}: {_PLACES} is damaged: {error!r}") from error


def _offsets(path: Path, name: str, places: Mapping[Any, Any], axes: int) -> tuple[int, ...]:
    if not places:
        return (0,) * axes
    place = expect(places.get(name), dict, path, f"{_PLACES} of {name}")
    values = expect_list(place.get(_OFFSETS), path, f"{_OFFSETS} of {name}")
    offsets = tuple(expect(value, int, path, f"{_OFFSETS} of {name}") for value in values)
    if len(offsets) != axes or any(offset < 0 for offset in offsets):
        raise StateError(f"{path}: {_OFFSETS} of {name} is {list(offsets)}; copy the file again")
    return offsets


def _weight(folder: Path, name: str, parts: Iterable[tuple[Chunk, str]]) -> ShardedWeight:
    chunks = tuple(chunk for chunk, _ in parts)
    dtypes = {dtype for _, dtype in parts}
    ends = [
        [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        for chunk in chunks
    ]
    if len(dtypes) > 1 or len({len(each) for each in ends}) > 1:
        raise StateError(f"{folder}: parts of {name} have several types or numbers of axes")
    shape = tuple(map(max, zip(*ends, strict=True)))
    check_chunks(folder, name, shape, chunks)
    return ShardedWeight(
        folder=folder, key=name, dtype=TYPES[dtypes.pop()], shape=shape, chunks=chunks
    )
