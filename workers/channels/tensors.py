"""Tensors as frames, or as one flat buffer, and back.

Raw bytes, row-major, native (little-endian) order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from penstock.host.errors import ProtocolError
from penstock.protocol.wire.frames import TensorHeader

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "int64": torch.int64,
        "int32": torch.int32,
        "bool": torch.bool,
    }
)
"""Types that can be sent, by their name in :class:`~penstock.protocol.wire.frames.TensorHeader`."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_AXES = 8
_MAX_ELEMENTS = 1 << 40
_ALIGNMENT_BYTES = 256


def to_frames(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[tuple[TensorHeader, ...], list[memoryview]]:
    """Returns headers and buffers of host tensors of any shape, in a dtype of :data:`DTYPES`.

    Buffers alias tensors that are contiguous already: these must not be written until all is sent.

    Raises:
        ProtocolError: a tensor has a type that cannot travel.
    """
    buffers = []
    headers = headers_of(tensors)
    for tensor in tensors.values():
        # Detached, because NumPy refuses tensors that require gradients.
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        array: npt.NDArray[np.uint8] = flat.numpy()
        buffers.append(array.data)
    return headers, buffers


def from_frames(
    headers: Sequence[TensorHeader], buffers: Sequence[memoryview]
) -> dict[str, torch.Tensor]:
    """Returns tensors of the headers' shapes and types, in host memory of their own.

    They are copied because message buffers start at any address. Matrix kernels give equal bits
    only for equally aligned operands; torch allocates at multiples of 64 bytes. NumPy copies on the
    calling thread alone: torch would start a second team of compute threads.

    Raises:
        ProtocolError: a header has an unknown type or too many axes, or the length of a buffer
            differs from its header.
    """
    if len(headers) != len(buffers):
        raise ProtocolError(f"{len(buffers)} buffers for {len(headers)} tensors")
    tensors: dict[str, torch.Tensor] = {}
    for header, buffer in zip(headers, buffers, strict=True):
        dtype, size = _checked(header)
        if header.name in tensors:
            raise ProtocolError(f"tensor {header.name[:40]!r}: there are two")
        if size != len(buffer):
            raise ProtocolError(
                f"tensor {header.name[:40]!r}: {len(buffer)} bytes for shape {header.shape[:8]}"
            )
        tensor = torch.empty(header.shape, dtype=dtype)
        target = tensor.reshape(-1).view(torch.uint8).numpy()
        np.copyto(target, np.frombuffer(buffer, dtype=np.uint8) if len(buffer) else target)
        tensors[header.name] = tensor
    return tensors


def headers_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorHeader, ...]:
    """Returns names, types and shapes of tensors of any shape.

    Raises:
        ProtocolError: a tensor has a type that cannot travel.
    """
    headers = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ProtocolError(f"tensor {name!r}: {tensor.dtype} cannot be sent")
        headers.append(
            TensorHeader(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))
        )
    return tuple(headers)


class Packing:
    """Named tensors in one flat buffer of bytes on their device, each at a multiple of 256."""

    def __init__(self, headers: Sequence[TensorHeader]) -> None:
        """Lays tensors out in one buffer; ``num_bytes`` is its size.

        Raises:
            ProtocolError: a header has an unknown type, too many axes or bytes, or a repeated name.
        """
        self.headers = tuple(headers)
        if len({header.name for header in headers}) != len(headers):
            raise ProtocolError("tensors of one transfer need names of their own")
        self._parts: list[tuple[TensorHeader, torch.dtype, int, int]] = []
        self.num_bytes = 0
        for header in headers:
            dtype, size = _checked(header)
            # Kernels promise equal bits only for equally aligned operands.
            start = -(-self.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._parts.append((header, dtype, start, start + size))
            self.num_bytes = start + size
        if self.num_bytes > _MAX_ELEMENTS:
            raise ProtocolError(f"a transfer of {self.num_bytes} bytes")

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the flat buffer, (num_bytes,) uint8, of tensors with the headers' shapes and
        types.

        A single contiguous tensor is not copied: the buffer is its memory.
        """
        flats = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors.values()]
        if len(flats) == 1:
            return flats[0]
        device = flats[0].device if flats else None
        packed = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for flat, (_, _, start, stop) in zip(flats, self._parts, strict=True):
            packed[start:stop].copy_(flat)
        return packed

    def unpack(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors, of the headers' shapes and types, over the memory of ``packed``,
        (num_bytes,) uint8.
        """
        return {
            header.name: packed[start:stop].view(dtype).view(header.shape)
            if stop > start
            else torch.empty(header.shape, dtype=dtype, device=packed.device)
            for header, dtype, start, stop in self._parts
        }


def _checked(header: TensorHeader) -> tuple[torch.dtype, int]:
    """Returns type and bytes of a tensor that a peer describes; refuses sizes that could exhaust
    memory.
    """
    dtype = DTYPES.get(header.dtype)
    # Also for empty tensors: strides of huge extents overflow.
    huge = prod(max(1, extent) for extent in header.shape) > _MAX_ELEMENTS
    if dtype is None or huge or len(header.shape) > _MAX_AXES:
        raise ProtocolError(f"tensor {header.name[:40]!r}: bad type or shape")
    return dtype, prod(header.shape) * dtype.itemsize


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the bytes of all tensors, of any shape and dtype."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
