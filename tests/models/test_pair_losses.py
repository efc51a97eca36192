"""Losses of pairs and log-probabilities in chunks, against torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from penstock.models.data.batch import MicroBatch, with_likelihoods
from penstock.models.data.preferences import Likelihood, PairObjective, Preferences
from penstock.models.loss import LogitsOf, LossHead, chunked_log_probs
from penstock.models.pair_losses import PairTargets, chunked_pairs
from tests.models.test_loss import CHUNK, Head, gathering

SEQUENCES, LENGTH, BETA = 6, 4, 0.3
REFERENCES = np.array([-20.0, -9.0, -33.0, -21.0, 0.0, 0.0])
"""The last pair has no counted token."""

OBJECTIVES = (
    PairObjective(name="dpo", beta=BETA),
    PairObjective(name="dpo", beta=BETA, smoothing=0.2),
    PairObjective(
        name="orpo",
        beta=1.5,
        likelihood=Likelihood(factor=1.0, prompts=True, mean="tokens"),
    ),
    PairObjective(
        name="orpo",
        beta=1.5,
        likelihood=Likelihood(factor=0.4, prompts=False, mean="samples"),
    ),
    PairObjective(name="simpo", beta=2.0, gamma=0.7),
    PairObjective(
        name="simpo",
        beta=2.0,
        gamma=0.7,
        smoothing=0.2,
        likelihood=Likelihood(factor=0.6, prompts=False, mean="tokens"),
    ),
)


def loss_head(head: Head) -> LossHead:
    """The head as :func:`chunked_pairs` takes it."""

    @contextmanager
    def in_backward() -> Iterator[LogitsOf]:
        with gathering(head.block, head.block) as over:
            yield head.logits_over(over)

    return LossHead(logits_of=head.logits_over(head.block), in_backward=in_backward)


def labels_of(head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of the sequences, some of which do not count, and those of whole texts."""
    labels = head.labels[: SEQUENCES * LENGTH].reshape(SEQUENCES, LENGTH).clamp_min(0).clone()
    texts = labels.clone()
    labels[0, 0], labels[1, 2:], labels[2, :2] = -100, -100, -100
    texts[1::2], texts[2, 3:], labels[2, 3:] = -100, -100, -100
    labels[4:] = -100
    return labels, texts


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    texts: torch.Tensor,
    objective: PairObjective,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss and margins of the first two pairs, in fp64 by torch's operators."""
    logits = (hidden @ weight.t()).reshape(SEQUENCES, LENGTH, -1).log_softmax(-1)
    logits, labels, texts = logits[:4], labels[:4], texts[:4]

    def each(kept: torch.Tensor) -> torch.Tensor:
        return logits.gather(-1, kept.clamp_min(0)[..., None])[..., 0] * (kept != -100)

    sums, sizes = each(labels).sum(1), (labels != -100).sum(1)
    if objective.name == "dpo":
        scores = sums - torch.from_numpy(REFERENCES[:4])
    else:
        scores = sums / sizes
    margins = objective.beta * (scores[0::2] - scores[1::2])
    if objective.name == "orpo":
        odds = scores.exp() / (1 - scores.exp())
        losses = -objective.beta * torch.log(torch.sigmoid((odds[0::2] / odds[1::2]).log()))
    else:
        s, aim = objective.smoothing, margins - objective.gamma
        losses = -(1 - s) * F.logsigmoid(aim) - s * F.logsigmoid(-aim)
    loss, term = losses.mean(), objective.likelihood
    if term is not None:
        kept = (texts if term.prompts else labels)[0::2]
        tokens = -logits[0::2].gather(-1, kept.clamp_min(0)[..., None])[..., 0] * (kept != -100)
        if term.mean == "tokens":
            loss = loss + term.factor * tokens.sum() / (kept != -100).sum()
        else:
            loss = loss + term.factor * (tokens.sum(1) / (kept != -100).sum(1)).mean()
    return loss, margins


def batches_of(head: Head, objective: PairObjective, size: int) -> list[MicroBatch]:
    """The sequences as a global batch of micro-batches of ``size`` rows."""
    labels, texts = labels_of(head)
    prompts = objective.likelihood is not None and objective.likelihood.prompts
    batches = []
    for first in range(0, SEQUENCES, size):
        part = slice(first, first + size)
        preferences = Preferences(
            objective=objective,
            references=REFERENCES[part] if objective.name == "dpo" else None,
            text_labels=texts[part].numpy() if prompts else None,
        )
        batches.append(
            MicroBatch(
                input_ids=np.zeros((size, LENGTH), np.int64),
                labels=labels[part].numpy(),
                preferences=preferences,
            )
        )
    return with_likelihoods(batches)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("chunk_rows", [CHUNK, 5, 100])
@pytest.mark.parametrize("size", [2, SEQUENCES])
def test_losses_and_gradients_of_pairs_are_those_of_torch(
    size: int, chunk_rows: int, objective: PairObjective
) -> None:
    """The likelihood term has its mean over the global batch in micro-batches of any size."""
    head = Head(torch.float32)
    before, batches = head.sums.clone(), batches_of(head, objective, size)
    counted = sum(batch.num_losses for batch in batches)
    assert counted == 2 and np.concatenate([b.pairs for b in batches]).tolist() == [1, 1, 0]
    loss, margins = torch.zeros(()), []
    for number, batch in enumerate(batches):
        rows = slice(number * size * LENGTH, (number + 1) * size * LENGTH)
        targets = PairTargets.of(batch, torch.from_numpy)
        sums = chunked_pairs(loss_head(head), head.hidden[rows], targets, chunk_rows=chunk_rows)
        (sums.loss * 0.37 / counted).backward()
        loss = loss + sums.loss.detach()
        assert sums.scores is not None and batch.preferences is not None
        margins.append(batch.preferences.margins(sums.scores.numpy())[batch.pairs])
    count = SEQUENCES * LENGTH
    hidden = head.hidden.detach()[:count].double().requires_grad_()
    weight = head.block.leaves["weight"].detach().double().requires_grad_()
    expected, plain_margins = plain(hidden, weight, *labels_of(head), objective)
    (expected * 0.37).backward()
    np.testing.assert_allclose(np.concatenate(margins), plain_margins.detach().numpy(), rtol=1e-5)
    torch.testing.assert_close(loss.double() / counted, expected, rtol=1e-6, atol=0)
    assert head.hidden.grad is not None and hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(head.hidden.grad[:count].double(), hidden.grad, rtol=1e-5, atol=1e-7)
    added = (head.sums - before).double()
    torch.testing.assert_close(added, weight.grad, rtol=1e-5, atol=1e-6)


def test_odds_of_certain_answers_have_finite_losses_and_gradients() -> None:
    """Logits decide each token of the first answer: its probability is 1 in fp32."""
    labels = np.array([[1, 1], [1, 1]])
    objective = PairObjective(name="orpo", beta=0.5)
    batch = MicroBatch(
        input_ids=labels, labels=labels, preferences=Preferences(objective=objective)
    )
    for certain in ([0, 1], [2, 3], [0, 1, 2, 3]):
        hidden = torch.zeros(4, 3)
        hidden[certain, 1] = 200.0
        hidden.requires_grad_()
        head = LossHead(logits_of=lambda rows: rows, in_backward=lambda: None)  # type: ignore[arg-type,return-value]
        targets = PairTargets.of(batch, torch.from_numpy)
        sums = chunked_pairs(head, hidden, targets, chunk_rows=8)
        sums.loss.backward()
        assert hidden.grad is not None and sums.scores is not None
        assert torch.isfinite(sums.loss) and torch.isfinite(hidden.grad).all()
        assert float(sums.scores.max()) == 0.0


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
