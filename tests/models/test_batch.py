"""Weights that let samples count alike, against fractions by hand."""

from __future__ import annotations

import numpy as np

from penstock.models.data.batch import MicroBatch, weighted_by_sample

NO = -100


def batch(labels: list[list[int]], documents: list[list[int]] | None = None) -> MicroBatch:
    """A micro-batch of these labels."""
    given = None if documents is None else np.array(documents)
    return MicroBatch(
        input_ids=np.ones((len(labels), len(labels[0])), dtype=np.int64),
        labels=np.array(labels),
        document_ids=given,
    )


def test_samples_without_a_counted_token_have_no_share() -> None:
    """Five counted tokens of three samples; four other samples have none, in rows of their own, in
    front of others, between them and behind them.
    """
    batches = [
        batch([[NO, NO, 7, 7, 7, NO]], [[0, 0, 1, 1, 1, 2]]),
        batch([[NO] * 6, [7, NO, NO, NO, 7, NO]], [[0] * 6, [0, 0, 1, 1, 2, 2]]),
    ]
    third, whole = 5 / (3 * 3), 5 / (3 * 1)
    weights = [made.label_weights for made in weighted_by_sample(batches)]
    expected = [
        [[0, 0, third, third, third, 0]],
        [[0] * 6, [whole, 0, 0, 0, whole, 0]],
    ]
    for one, other in zip(weights, expected, strict=True):
        assert one is not None
        np.testing.assert_array_equal(one, np.array(other, dtype=np.float32))


def test_rows_without_documents_are_samples() -> None:
    (made,) = weighted_by_sample([batch([[NO, 7], [NO, NO], [7, 7]])])
    assert made.label_weights is not None
    assert made.label_weights.tolist() == [[0, 1.5], [0, 0], [0.75, 0.75]]
