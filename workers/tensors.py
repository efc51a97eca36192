"""Tensors as frames and back. Raw bytes, row-major, native (little-endian) order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from penstock.protocol.errors import ProtocolError
from penstock.protocol.frames import TensorHeader

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
"""Types that may travel, by their name in :class:`~penstock.protocol.frames.TensorHeader`."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_AXES = 8
_MAX_ELEMENTS = 1 << 40


def to_frames(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[tuple[TensorHeader, ...], list[memoryview]]:
    """Headers and buffers of host tensors. Buffers alias tensors that are contiguous already.

    Raises:
        ProtocolError: a type that cannot travel.
    """
    headers, buffers = [], []
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ProtocolError(f"tensor {name!r}: {tensor.dtype} cannot be sent")
        headers.append(
            TensorHeader(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))
        )
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        array: npt.NDArray[np.uint8] = flat.numpy()
        buffers.append(array.data)
    return tuple(headers), buffers


def from_frames(
    headers: Sequence[TensorHeader], buffers: Sequence[memoryview]
) -> dict[str, torch.Tensor]:
    """Tensors in memory of their own.

    They are copied because message buffers start anywhere, and matrix kernels promise equal bits
    only for equally aligned operands; torch allocates at multiples of 64 bytes. NumPy copies on the
    calling thread alone: torch would start a second team of compute threads.

    Raises: ProtocolError: unknown type, too many axes, or a buffer whose length is not that of its
    header.
    """
    if len(headers) != len(buffers):
        raise ProtocolError(f"{len(buffers)} buffers for {len(headers)} tensors")
    tensors: dict[str, torch.Tensor] = {}
    for header, buffer in zip(headers, buffers, strict=True):
        dtype = DTYPES.get(header.dtype)
        # Also for empty tensors: strides of huge extents overflow.
        huge = prod(max(1, extent) for extent in header.shape) > _MAX_ELEMENTS
        if dtype is None or huge or len(header.shape) > _MAX_AXES or header.name in tensors:
            raise ProtocolError(f"tensor {header.name[:40]!r}: bad type, shape or name")
        if prod(header.shape) * dtype.itemsize != len(buffer):
            raise ProtocolError(
                f"tensor {header.name[:40]!r}: {len(buffer)} bytes for shape {header.shape[:8]}"
            )
        tensor = torch.empty(header.shape, dtype=dtype)
        target = tensor.reshape(-1).view(torch.uint8).numpy()
        np.copyto(target, np.frombuffer(buffer, dtype=np.uint8) if len(buffer) else target)
        tensors[header.name] = tensor
    return tensors


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
