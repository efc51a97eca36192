"""Rows of samples: which samples share a row of tokens. No torch.

``best-fit`` is best-fit decreasing, as TRL's strategy ``bfd``: the longest sample first, each into
the row with the least space that is enough. Of several such rows the earliest one takes it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


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
    order: list[int] = []
    starts = [0]
    size = window or max(1, len(lengths))
    for first in range(0, len(lengths), size):
        for row in _packed(lengths[first : first + size], capacity):
            order.extend(first + number for number in row)
            starts.append(len(order))
    return Rows(order=np.array(order, dtype=np.int64), starts=np.array(starts, dtype=np.int64))


def _packed(lengths: Lengths, capacity: int) -> Iterator[list[int]]:
    """Yields the samples of each row, in the order in which rows are opened."""
    rows: list[list[int]] = []
    by_space: dict[int, deque[list[int]]] = defaultdict(deque)
    spaces = 0  # bit n is set if a row has space for exactly n tokens
    longest_first = np.argsort(-lengths, kind="stable")
    for number, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        if enough := spaces >> length:
            space = length + (enough & -enough).bit_length() - 1
            row = by_space[space].popleft()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = capacity, []
            rows.append(row)
        row.append(number)
        if left := space - length:
            by_space[left].append(row)
            spaces |= 1 << left
    yield from rows
