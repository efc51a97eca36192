"""A float32 master in two halves: upper ones, which are bf16 weights, and lower ones.

The upper half is the float32, rounded half up in the bits; the lower half its low 16 bits. Together
they are the very float32, for all bit patterns (``native/storage.h`` has the passes' way)::

    split   high = (bits + 0x8000) >> 16           low = bits & 0xFFFF
    join    bits = (high << 16) + low - ((low >> 15) << 16)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Two uint16 arrays of one length that hold float32 values."""

    high: npt.NDArray[np.uint16]
    low: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.low)

    def part(self, start: int, end: int) -> Halves:
        """Elements ``[start, end)``, in place."""
        return Halves(high=self.high[start:end], low=self.low[start:end])

    def load(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.float32]:
        """Elements ``[start, end)``, joined: a copy."""
        high, low = self.high[start:end].astype(np.uint32), self.low[start:end].astype(np.uint32)
        high -= low >> 15
        high <<= 16
        high |= low
        return high.view(np.float32)

    def store(self, values: npt.NDArray[Any], start: int = 0) -> None:
        """Write float32 values from element ``start`` on."""
        for first in range(0, values.size, _CHUNK_ELEMENTS):
            bits = values[first : first + _CHUNK_ELEMENTS].view(np.uint32)
            place = slice(start + first, start + first + bits.size)
            self.low[place] = bits & 0xFFFF
            # The carry of the rounding falls out of the upper half, as in the passes.
            self.high[place] = (bits >> 16) + ((bits >> 15) & 1)
