"""The data that a stage needs of a micro-batch, in NumPy arrays.

:mod:`penstock.models.runtime` makes tensors of them; :mod:`penstock.workers.data` makes
micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100
"""Positions with this label take no part in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Arrays of shape ``(micro_batch, sequence)``, int64 unless said otherwise.

    ``labels[i, t]`` is the token that position ``t`` must predict (already shifted), or
    :data:`IGNORED_LABEL`; a model that predicts once for a sequence has labels (micro_batch, 1).
    ``attention_mask`` (bool) is False at padding. ``position_ids`` restart at 0 with every document
    when documents are kept apart; ``document_ids`` then numbers the documents of a row from 0, and
    attention stays inside a document.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64] | None = None
    attention_mask: NDArray[np.bool_] | None = None
    document_ids: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(micro_batch, sequence)`` of every array."""
        return self.input_ids.shape[0], self.input_ids.shape[1]

    @property
    def counted_tokens(self) -> int:
        """The number of labels that take part in the loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))


def places_in_documents(
    begins: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns ``position_ids`` and ``document_ids`` of rows. ``begins`` is true at the first token
    of each document but the first of a row.
    """
    steps = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    latest_begin = np.maximum.accumulate(np.where(begins, steps, 0), axis=1)
    return steps - latest_begin, np.cumsum(begins, axis=1, dtype=np.int64)
