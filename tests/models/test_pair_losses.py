"""Losses of pairs and log-probabilities in chunks, against torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from penstock.models.data.batch import MicroBatch, Preferences
from penstock.models.loss import LogitsOf, LossHead, Targets, chunked_log_probs, chunked_pairs
from tests.models.test_loss import CHUNK, Head, gathering

SEQUENCES, LENGTH, BETA = 6, 4, 0.3
REFERENCES = np.array([-20.0, -9.0, -33.0, -21.0, 0.0, 0.0])
"""The last pair has no counted token."""


def loss_head(head: Head) -> LossHead:
    """The head as :func:`chunked_pairs` takes it."""

    @contextmanager
    def in_backward() -> Iterator[LogitsOf]:
        with gathering(head.block, head.block) as over:
            yield head.logits_over(over)

    return LossHead(logits_of=head.logits_over(head.block), in_backward=in_backward)


def labels_of(head: Head) -> torch.Tensor:
    """Labels of the sequences, some of which do not count."""
    labels = head.labels[: SEQUENCES * LENGTH].reshape(SEQUENCES, LENGTH).clone()
    labels[1, 2:] = -100
    labels[4:] = -100
    return labels


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss and margins of the pairs, in fp64 by torch's operators."""
    logits = (hidden @ weight.t()).reshape(SEQUENCES, LENGTH, -1).log_softmax(-1)
    tokens = logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    totals = (tokens * (labels != -100)).sum(1)
    ratios = totals - torch.from_numpy(REFERENCES)
    margins = (BETA * (ratios[0::2] - ratios[1::2]))[:2]
    losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
    return losses.sum(), margins


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("chunk_rows", [CHUNK, 5, 100])
def test_losses_and_gradients_of_pairs_are_those_of_torch(
    chunk_rows: int, smoothing: float
) -> None:
    head = Head(torch.float32)
    labels, before = labels_of(head), head.sums.clone()
    batch = MicroBatch(
        input_ids=np.zeros((SEQUENCES, LENGTH), np.int64),
        labels=labels.numpy(),
        preferences=Preferences(references=REFERENCES, beta=BETA, smoothing=smoothing),
    )
    assert (batch.num_losses, batch.pairs.tolist()) == (2, [True, True, False])
    targets = Targets.of(batch, torch.from_numpy, smoothing=0.5)
    rows = SEQUENCES * LENGTH
    sums = chunked_pairs(loss_head(head), head.hidden[:rows], targets, chunk_rows=chunk_rows)
    (sums.loss * 0.37).backward()
    hidden = head.hidden.detach()[:rows].double().requires_grad_()
    weight = head.block.leaves["weight"].detach().double().requires_grad_()
    loss, margins = plain(hidden, weight, labels, smoothing)
    (loss * 0.37).backward()
    assert sums.log_probs is not None and batch.preferences is not None
    made = batch.preferences.margins(sums.log_probs.numpy())[batch.pairs]
    np.testing.assert_allclose(made, margins.detach().numpy(), rtol=1e-5)
    torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-6, atol=0)
    assert head.hidden.grad is not None and hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(head.hidden.grad[:rows].double(), hidden.grad, rtol=1e-5, atol=1e-7)
    added = (head.sums - before).double()
    torch.testing.assert_close(added, weight.grad, rtol=1e-5, atol=1e-6)


def test_chunks_keep_no_logits() -> None:
    """A chunk of five rows is the most that the head computes at once, also in the backward."""
    whole, chunks = Head(torch.float32), Head(torch.float32)
    results = []
    for head, chunk_rows in ((whole, 100), (chunks, 5)):
        made = chunked_log_probs(loss_head(head), head.hidden, head.labels, chunk_rows=chunk_rows)
        (made * torch.linspace(-2, 2, len(made))).sum().backward()
        results.append(made)
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
    assert results[0][4] == results[1][4] == 0
    assert max(chunks.rows) == 5 and len(chunks.rows) == 10
    assert whole.hidden.grad is not None and chunks.hidden.grad is not None
    torch.testing.assert_close(whole.hidden.grad, chunks.hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.sums, chunks.sums, rtol=1e-5, atol=1e-6)
