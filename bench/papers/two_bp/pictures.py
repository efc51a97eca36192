"""Real pictures for ResNet: 1,797 handwritten digits of 8 x 8 pixels, which scikit-learn brings.

A token file holds them one after another: the class, then the pixels row by row. It is shuffled,
checked and resumed like any other (``data.tokens``); :func:`digits` is its ``data.objective``. No
torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models.data.batch import MicroBatch

SIDE = 8
CLASSES = 10
LEVELS = 17
"""Pixels have values from 0 to 16."""
SEQUENCE_LENGTH = 1 + SIDE * SIDE


def write_digits(path: Path) -> int:
    """Writes the token file, little-endian uint16; returns the number of pictures."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    records = np.column_stack([bunch.target, bunch.data]).astype("<u2")
    # A sequence takes one token more than its length, which next tokens would need.
    np.append(records.reshape(-1), np.uint16(0)).astype("<u2").tofile(path)
    return len(records)


def digits(tokens: NDArray[np.int64]) -> MicroBatch:
    """Returns pixels, (micro_batch, 64), and classes, (micro_batch, 1), of int64 ``tokens``,
    (micro_batch, 66).
    """
    return MicroBatch(
        input_ids=np.ascontiguousarray(tokens[:, 1:SEQUENCE_LENGTH]), labels=tokens[:, :1].copy()
    )
