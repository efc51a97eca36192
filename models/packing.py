"""Between a block's tensors by name and its two flat arrays. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shm.table import BlockSpec

Flat = NDArray[np.float32]


def pack(block: BlockSpec, tensors: Mapping[str, Any]) -> tuple[Flat, Flat]:
    """Flat fp32 arrays of ``trainable_elements`` and ``frozen_elements``; padding is zero.

    ``tensors`` maps the names of the block's tensors to arrays or CPU tensors of their shapes.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    trainable = np.zeros(block.trainable_elements, dtype=np.float32)
    frozen = np.zeros(block.frozen_elements, dtype=np.float32)
    for spec in block.tensors:
        if spec.name not in tensors:
            raise ValueError(f"block {block.name!r}: tensor {spec.name!r} is missing")
        value = np.asarray(tensors[spec.name], dtype=np.float32)
        if value.shape != spec.shape:
            raise ValueError(
                f"block {block.name!r}: {spec.name!r} has shape {value.shape}, expected"
                f" {spec.shape}"
            )
        flat = trainable if spec.trainable else frozen
        flat[spec.offset : spec.offset + spec.num_elements] = value.reshape(-1)
    return trainable, frozen


def unpack(
    block: BlockSpec, trainable: NDArray[Any] | None, frozen: NDArray[Any] | None
) -> dict[str, NDArray[Any]]:
    """Views of the flat arrays by tensor name; an array given as None leaves its tensors out."""
    views = {}
    for spec in block.tensors:
        flat = trainable if spec.trainable else frozen
        if flat is not None:
            views[spec.name] = flat[spec.offset : spec.offset + spec.num_elements].reshape(
                spec.shape
            )
    return views
