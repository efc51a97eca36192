"""Places of a model's tensors in published weight files, and copies of memory in that form.

A layout is made once for a model, without its weights (:mod:`penstock.models.checkpoints.exports`).
With the layout, memoryd copies weights from its memory straight to their places in the files, and
needs neither torch nor transformers. Each tensor of a file is a view of one tensor of the block
table: elements ``offset + sum(index * stride)``, rounded to the written type.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock._native import round_halves
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, parse_json
from penstock.shm.memory import Array, Halves
from penstock.shm.table import BlockTable, DType, TensorSpec

LAYOUT = "layout.json"
"""Name of a layout in the folder that gets the copy."""

BY_STATE = "by state"
"""Start of a process's line about a copy without a layout: it needs a saved state and an export."""

CHUNK_ELEMENTS = 1 << 18
"""Elements that are rounded and written at a time: their temporaries stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTensor:
    """A tensor of a file. ``source`` is the tensor of ``block`` in the table. ``offset`` and
    ``strides`` count elements of ``source``, ``start`` counts bytes of the file.
    """

    block: int
    source: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    start: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.num_elements * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Elements of ``source`` up to the last one of the view."""
        return self.offset + 1 + sum((n - 1) * s for n, s in self._extents)

    @property
    def contiguous(self) -> bool:
        """True if the elements are one range of ``source``, in order."""
        expected = 1
        for extent, stride in reversed(list(self._extents)):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    @property
    def _extents(self) -> Iterator[tuple[int, int]]:
        return zip(self.shape, self.strides, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file of the copy, with the tensors that memoryd writes."""

    name: str
    num_bytes: int
    tensors: tuple[PublishedTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLayout:
    """All files of a copy. Tensors of one block are in one file."""

    table_digest: str
    files: tuple[PublishedFile, ...]

    def to_json(self) -> str:
        """Returns the text of :data:`LAYOUT`."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, content: bytes, table: BlockTable, place: str) -> PublishedLayout:
        """Returns the layout with all places inside their tensors and files.

        Raises:
            StateError: the content is damaged, or of another model; names ``place``.
        """
        try:
            fields = parse_json(content)
            digest, listed = str(fields["table_digest"]), fields["files"]
            if digest != table.digest:
                raise ValueError(f"it is of the table {digest[:12]}, not {table.digest[:12]}")
            files = tuple(_file(entry, table) for entry in listed)
            homes: dict[int, str] = {}
            for file in files:
                for tensor in file.tensors:
                    if homes.setdefault(tensor.block, file.name) != file.name:
                        raise ValueError(f"block {tensor.block} is in two files")
        except DAMAGED as error:
            raise StateError(f"{place}: the layout is damaged: {error}") from error
        return cls(table_digest=digest, files=files)

    def by_block(self) -> dict[int, tuple[PublishedFile, list[PublishedTensor]]]:
        """Returns the file and the tensors of each block."""
        blocks: dict[int, tuple[PublishedFile, list[PublishedTensor]]] = {}
        for file in self.files:
            for tensor in file.tensors:
                blocks.setdefault(tensor.block, (file, []))[1].append(tensor)
        return blocks


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _file(entry: Mapping[str, Any], table: BlockTable) -> PublishedFile:
    name, size = str(entry["name"]), _count(entry["num_bytes"])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a file name")
    tensors = tuple(_tensor(tensor, table, size) for tensor in entry["tensors"])
    return PublishedFile(name=name, num_bytes=size, tensors=tensors)


def _tensor(entry: Mapping[str, Any], table: BlockTable, file_bytes: int) -> PublishedTensor:
    tensor = PublishedTensor(
        block=_count(entry["block"]),
        source=str(entry["source"]),
        offset=_count(entry["offset"]),
        shape=tuple(_count(extent) for extent in entry["shape"]),
        strides=tuple(_count(stride) for stride in entry["strides"]),
        dtype=DType(entry["dtype"]),
        start=_count(entry["start"]),
    )
    spec = source_of(tensor, table)
    if len(tensor.shape) != len(tensor.strides) or not tensor.num_elements:
        raise ValueError(f"{tensor.source}: shape {tensor.shape} with strides {tensor.strides}")
    if tensor.end > spec.num_elements:
        raise ValueError(f"{tensor.source}: element {tensor.end} of {spec.num_elements}")
    if tensor.start + tensor.num_bytes > file_bytes:
        raise ValueError(f"{tensor.source}: ends after the file's {file_bytes} bytes")
    return tensor


def source_of(tensor: PublishedTensor, table: BlockTable) -> TensorSpec:
    """Returns the tensor of the table that a tensor of a file is a view of.

    Raises:
        ValueError: the table has no such tensor.
    """
    if tensor.block < len(table.blocks):
        for spec in table.blocks[tensor.block].tensors:
            if spec.name == tensor.source:
                return spec
    raise ValueError(f"the table has no tensor {tensor.source!r} in block {tensor.block}")


def pieces(tensor: PublishedTensor, values: Array | Halves, dtype: DType) -> Iterator[memoryview]:
    """Yields the bytes of a tensor of a file in order. ``values``: elements of its source, 1-D, in
    the type ``dtype`` (bf16 as uint16 bits).

    Raises:
        ConfigError: the written type is fp16 and cannot hold a number.
    """
    # Bytes that stay as they are go to the kernel in fewer calls.
    count = CHUNK_ELEMENTS * (16 if dtype is tensor.dtype else 1)
    load: Callable[[Halves, int, int], Array] = Halves.load
    if isinstance(values, Halves) and tensor.dtype is DType.BF16:
        load, dtype = bf16, DType.BF16
    for part in _parts(tensor, values, count, load):
        written = rounded(part, dtype, tensor.dtype)
        if tensor.dtype is DType.FP16 and np.isinf(written).any():
            raise ConfigError(
                f"--dtype fp16: {tensor.source} has numbers that fp16 cannot hold; give bf16 or"
                " fp32"
            )
        yield written.data.cast("B")


def _parts(
    tensor: PublishedTensor,
    values: Array | Halves,
    count: int,
    load: Callable[[Halves, int, int], Array],
) -> Iterator[Array]:
    """Yields consecutive elements of a tensor as contiguous arrays of about ``count`` elements.
    ``load`` returns a range of elements in halves.
    """
    if tensor.contiguous:
        for start in range(tensor.offset, tensor.end, count):
            end = min(start + count, tensor.end)
            yield load(values, start, end) if isinstance(values, Halves) else values[start:end]
        return
    if isinstance(values, Halves):
        values = load(values, 0, tensor.end)
    view = np.lib.stride_tricks.as_strided(
        values[tensor.offset : tensor.end],
        tensor.shape,
        [stride * values.itemsize for stride in tensor.strides],
        writeable=False,
    )
    rows = max(1, count * tensor.shape[0] // tensor.num_elements)
    for first in range(0, tensor.shape[0], rows):
        yield np.ascontiguousarray(view[first : first + rows]).reshape(-1)


def bf16(values: Halves, start: int, end: int) -> Array:
    """Returns elements ``[start, end)`` in bf16, rounded to nearest even."""
    high, low = values.high[start:end], values.low[start:end]
    out = np.empty_like(high)
    if round_halves(high=high, low=low, out=out):
        return out
    return rounded(values.load(start, end), DType.FP32, DType.BF16)


def rounded(values: Array, given: DType, wanted: DType) -> Array:
    """Returns numbers of the type ``given`` in the type ``wanted``, rounded to nearest even. bf16
    is uint16 bits.
    """
    if given is wanted:
        return values
    wide = values
    if given is DType.BF16:
        wide = (values.astype(np.uint32) << 16).view(np.float32)
    elif given is DType.FP16:
        wide = values.astype(np.float32)
    if wanted is DType.FP32:
        return wide
    if wanted is DType.FP16:
        with np.errstate(over="ignore"):  # the caller refuses infinities
            return wide.astype(np.float16)
    bits = wide.view(np.uint32)
    # To nearest, ties to even: half a unit less one, and one more where the kept part is odd.
    upper = bits >> 16
    upper &= 1
    upper += 0x7FFF
    upper += bits
    upper >>= 16
    nan = np.isnan(wide)
    if nan.any():
        upper[nan] = 0x7FC0
    return upper.astype(np.uint16)
