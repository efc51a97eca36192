"""Tensors of a safetensors file over a read-only mapping of the file.

Such a mapping is no private memory of the process, and RLIMIT_DATA does not count it. The
safetensors library maps a file for writing, and RLIMIT_DATA counts all of the file.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16},
        **{"BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16},
        **{"I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
        **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
        **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    }
)
"""Torch's types by safetensors' names."""


def tensor_over(
    mapping: mmap.mmap, start: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Returns the contiguous tensor at byte ``start``, which must not be written to.

    Raises:
        ValueError: the mapping ends before the tensor does.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    with warnings.catch_warnings():
        # Torch has no read-only tensors and warns of a buffer that is.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapping, dtype=dtype, count=count, offset=start).view(tuple(shape))


class MappedFile:
    """A safetensors file. ``entries``: element type, shape and first byte of each tensor.
    ``metadata``: texts of the file's writer.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and reads its header.

        Raises:
            OSError: the file cannot be read.
            SafetensorError: the file is damaged.
        """
        # The library checks the header, and that the byte ranges fill the file.
        with safe_open(path, framework="np"), path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._mapping[:8], "little")
        fields = json.loads(self._mapping[8 : 8 + length])
        self.metadata: dict[str, str] = fields.pop("__metadata__", None) or {}
        self.entries: dict[str, tuple[str, tuple[int, ...], int]] = {
            name: (entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in fields.items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor over the mapping. The tensor must not be written to.

        Raises:
            SafetensorError: torch does not have the element type.
        """
        dtype, shape, start = self.entries[name]
        if dtype not in TYPES:
            raise SafetensorError(f"{name} is of type {dtype}, which torch does not read")
        return tensor_over(self._mapping, start, TYPES[dtype], shape)
