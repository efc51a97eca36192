"""The data that a stage needs of a micro-batch, in NumPy arrays.

:mod:`penstock.models.runtime` makes tensors of them; :mod:`penstock.workers.data` makes
micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.data.preferences import Preferences

IGNORED_LABEL = -100
"""Positions with this label take no part in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Arrays of shape ``(micro_batch, sequence)``, int64 unless said otherwise.

    ``labels[i, t]`` is the token that position ``t`` must predict (already shifted), or
    :data:`IGNORED_LABEL`; a model that predicts once for a sequence has labels (micro_batch, 1).
    ``attention_mask`` (bool) is False at padding. ``position_ids`` restart at 0 with every document
    when documents are kept apart; ``document_ids`` then numbers the documents of a row from 0, and
    attention stays inside a document. ``label_weights`` (fp32, the shape of ``labels``) are factors
    of the labels' losses; None: 1. Data with weights set them, and :func:`weighted_by_sample`.
    ``preferences``: rows are pairs, and the loss is that of pairs.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64] | None = None
    attention_mask: NDArray[np.bool_] | None = None
    document_ids: NDArray[np.int64] | None = None
    label_weights: NDArray[np.float32] | None = None
    preferences: Preferences | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(micro_batch, sequence)`` of every array."""
        return self.input_ids.shape[0], self.input_ids.shape[1]

    @property
    def counted_tokens(self) -> int:
        """The number of labels that take part in the loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))

    @property
    def num_losses(self) -> int:
        """The number of losses in the sum that a step divides by: pairs with a counted token, or
        counted tokens.
        """
        return self.counted_tokens if self.preferences is None else int(self.pairs.sum())

    @property
    def pairs(self) -> NDArray[np.bool_]:
        """True for each pair of rows with a counted token, (micro_batch / 2,)."""
        counted = (self.labels != IGNORED_LABEL).reshape(len(self.labels) // 2, -1)
        return np.asarray(counted.any(axis=1))

    @property
    def likelihood_tokens(self) -> NDArray[np.int64]:
        """The tokens of each pair that its likelihood term counts, (micro_batch / 2,): those of the
        chosen rows. A pair without a counted token has none.
        """
        assert self.preferences is not None
        texts = self.preferences.text_labels
        counted = (self.labels if texts is None else texts)[0::2] != IGNORED_LABEL
        return np.asarray(counted.sum(axis=1) * self.pairs)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The arrays of embedding and head."""
        arrays: list[NDArray[Any]] = [self.input_ids, self.labels]
        if self.label_weights is not None:
            arrays.append(self.label_weights)
        if self.preferences is not None:
            arrays += self.preferences.arrays
        return arrays

    @property
    def samples(self) -> NDArray[np.int64]:
        """The number of each label's sample, from 0, in the shape of ``labels``. A sample is a
        document of a row, or a whole row where documents are not kept apart. A number may have no
        label.
        """
        rows = np.broadcast_to(np.arange(len(self.labels))[:, None], self.labels.shape)
        documents = self.document_ids
        if documents is None or documents.shape != rows.shape:
            return rows
        least = int(documents.min())
        span = int(documents.max()) - least + 1
        if span <= documents.shape[1]:
            return rows * span + documents - least
        pairs = np.stack([rows.ravel(), documents.ravel()])
        numbers: NDArray[np.int64] = np.unique(pairs, axis=1, return_inverse=True)[1]
        return numbers.reshape(rows.shape)


def weighted_by_sample(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns the micro-batches of a global batch with weights that let all samples count alike.

    A label has the weight N / (S n), computed in fp64 and rounded once: N counted tokens and S
    samples in the global batch, n counted tokens in the label's sample. So the weighted sum of
    losses over N is the mean over samples of the samples' means. Samples without counted tokens
    are left out of S. Weights that a label has already are multiplied with the new ones.
    """
    samples = [batch.samples for batch in batches]
    counted = [batch.labels != IGNORED_LABEL for batch in batches]
    sizes = [np.bincount(s[c], minlength=1) for s, c in zip(samples, counted, strict=True)]
    num_tokens = sum(int(size.sum()) for size in sizes)
    num_samples = sum(int(np.count_nonzero(size)) for size in sizes)
    weighted = []
    for batch, numbers, counts, size in zip(batches, samples, counted, sizes, strict=True):
        weights = np.zeros(batch.labels.shape, dtype=np.float32)
        weights[counts] = num_tokens / (num_samples * size[numbers[counts]])
        if batch.label_weights is not None:
            weights *= batch.label_weights
        weighted.append(replace(batch, label_weights=weights))
    return weighted


def with_likelihoods(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns the micro-batches of a global batch with factors of the likelihood term of pairs;
    batches without such a term stay as they are.

    A step divides the sum of the losses by the number N of pairs. The factor of a
    token in the mean over tokens is a N / T. Here a is the factor of the term, and T the number of
    tokens in the global batch. In the mean over pairs it is a / t, with t tokens in the row.
    """
    counts = [b.likelihood_tokens if b.preferences is not None else None for b in batches]
    total = sum(int(count.sum()) for count in counts if count is not None)
    num_pairs = sum(batch.num_losses for batch in batches)
    made = []
    for batch, count in zip(batches, counts, strict=True):
        given = batch.preferences
        term = None if given is None else given.objective.likelihood
        if given is None or term is None or count is None:
            made.append(batch)
            continue
        divisors = count if term.mean == "samples" else count * 0 + total / max(1, num_pairs)
        factors = np.zeros(len(count))
        np.divide(term.factor, divisors, out=factors, where=count > 0)
        made.append(replace(batch, preferences=replace(given, likelihoods=factors)))
    return made


def places_in_documents(
    begins: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns ``position_ids`` and ``document_ids`` of rows. ``begins`` is true at the first token
    of each document but the first of a row.
    """
    steps = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    latest_begin = np.maximum.accumulate(np.where(begins, steps, 0), axis=1)
    return steps - latest_begin, np.cumsum(begins, axis=1, dtype=np.int64)
