"""Rows of samples: which samples share a row of tokens. No torch.

``best-fit`` is best-fit decreasing, as TRL's strategy ``bfd``: the longest sample first, each into
the row with the least space that is enough. Of several such rows the earliest one takes it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]

_PACKED_AT_ONCE = 1 << 16


class Packing(Enum):
    """Values of ``data.packing``."""

    NONE = "none"
    """Each sample has a row of its own."""
    BEST_FIT = "best-fit"
    """Whole samples share rows."""
    WRAPPED = "wrapped"
    """Documents form one text, which is cut into rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Samples by row: row ``i`` holds ``order[starts[i] : starts[i + 1]]``, in order."""

    order: Lengths
    starts: Lengths

    def __len__(self) -> int:
        return len(self.starts) - 1


def alone(lengths: Lengths) -> Rows:
    """Returns a row for each sample."""
    return Rows(order=np.arange(len(lengths)), starts=np.arange(len(lengths) + 1))


def best_fit(lengths: Lengths, capacity: int, window: int | None = None) -> Rows:
    """Returns rows of whole samples, at most ``capacity`` tokens each.

    ``lengths`` are between 1 and ``capacity``, int64 of shape (samples,). Samples share rows within
    ``window`` samples that follow each other, or within all.
    """
    orders, ends = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    size = window or max(1, len(lengths))
    for first in range(0, len(lengths), size):
        longest_first = np.argsort(-lengths[first : first + size], kind="stable")
        rows = _rows_of(lengths[first : first + size][longest_first], capacity)
        orders.append(first + longest_first[np.argsort(rows, kind="stable")])
        ends.append(first + np.cumsum(np.bincount(rows)))
    return Rows(order=np.concatenate(orders), starts=np.concatenate(ends))


def _rows_of(lengths: Lengths, capacity: int) -> Lengths:
    """Returns the row of each sample, (samples,); ``lengths`` decrease."""
    rows = array("q")
    spaces = _Spaces(capacity)
    opened = 0
    for at in range(0, len(lengths), _PACKED_AT_ONCE):
        for length in lengths[at : at + _PACKED_AT_ONCE].tolist():
            space = spaces.least(length)
            if space is None:
                space, row = capacity, opened
                opened += 1
            else:
                row = spaces.take(space)
            rows.append(row)
            if space > length:
                spaces.put(space - length, row)
    return np.frombuffer(rows, dtype=np.int64)


class _Spaces:
    """Rows by the tokens for which they have space; of equal ones the first put is the first taken.

    Rows with equal space form a list that is linked by their numbers: 8 bytes a row.
    """

    def __init__(self, capacity: int) -> None:
        self._some = 0
        """Bit ``n`` is set if a row has space for exactly ``n`` tokens."""
        self._first, self._last = [0] * capacity, [0] * capacity
        self._next = array("q")

    def least(self, length: int) -> int | None:
        """Returns the least space of at least ``length`` tokens; None if there is none."""
        enough = self._some >> length
        return length + (enough & -enough).bit_length() - 1 if enough else None

    def take(self, space: int) -> int:
        """Removes a row with this space, and returns its number."""
        row = self._first[space]
        if row == self._last[space]:
            self._some ^= 1 << space
        else:
            self._first[space] = self._next[row]
        return row

    def put(self, space: int, row: int) -> None:
        """Adds a row: one that was taken, or one with a greater number than all others."""
        if row >= len(self._next):
            self._next.extend([0] * (row + 1 - len(self._next)))
        if self._some >> space & 1:
            self._next[self._last[space]] = row
        else:
            self._some |= 1 << space
            self._first[space] = row
        self._last[space] = row
