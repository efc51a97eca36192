"""Losses of pairs of answers: dpo, orpo and simpo.

Each loss is a function of two scores of a pair, the chosen answer's and the rejected one's. A score
is the sum of the log-probabilities of an answer's tokens less its reference (dpo), or their mean
(orpo, simpo). :func:`chunked_pairs` adds the likelihood term of chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from penstock.config.values import DPO, ORPO, SIMPO
from penstock.models.data.batch import IGNORED_LABEL, MicroBatch
from penstock.models.data.preferences import PairObjective
from penstock.models.loss import LabelSums, LossHead, Moved, chunked_log_probs

_SATURATED = -1e-12
"""The greatest mean log-probability in a log odds ratio. Odds of an answer of probability 1 are
infinite, and their gradients undefined.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTargets:
    """:class:`~penstock.models.data.preferences.Preferences` on the device.

    ``labels``, (rows,) int64: the labels of answers, and of prompts with a likelihood term over
    them. ``answers``, (sequences, sequence) bool: labels of answers. ``counted``, (pairs,) bool:
    pairs that take part in the loss.
    """

    objective: PairObjective
    labels: torch.Tensor
    answers: torch.Tensor
    counted: torch.Tensor
    references: torch.Tensor | None = None
    likelihoods: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: MicroBatch, moved: Moved) -> PairTargets:
        """Returns the targets of a micro-batch of pairs on the device of ``moved``."""
        given = batch.preferences
        assert given is not None
        labels = moved(batch.labels)
        answers = labels != IGNORED_LABEL
        if given.text_labels is not None:
            labels = torch.where(answers, labels, moved(given.text_labels))
        return cls(
            objective=given.objective,
            labels=labels.reshape(-1),
            answers=answers,
            counted=moved(batch.pairs),
            references=None if given.references is None else moved(given.references),
            likelihoods=None if given.likelihoods is None else moved(given.likelihoods),
        )


def chunked_pairs(
    head: LossHead, hidden: torch.Tensor, targets: PairTargets, *, chunk_rows: int
) -> LabelSums:
    """Returns the summed losses of pairs of sequences, with the likelihood term. Arguments are
    those of :func:`~penstock.models.loss.chunked_cross_entropy`.
    """
    objective = targets.objective
    tokens = chunked_log_probs(head, hidden, targets.labels, chunk_rows=chunk_rows)
    # fp64: a sequence's log-probability may be thousands of nats, and its ratio near 0.
    tokens = tokens.double().reshape(targets.answers.shape)
    scores = (tokens * targets.answers).sum(dim=1)
    if targets.references is not None:
        scores = scores - targets.references
    if objective.has_means:
        # A pair without labels fills up a batch; its loss does not count.
        scores = scores / targets.answers.sum(dim=1).clamp_min(1)
    losses = _LOSSES[objective.name](scores[0::2], scores[1::2], objective) * targets.counted
    if targets.likelihoods is not None:
        losses = losses - targets.likelihoods * tokens[0::2].sum(dim=1)
    return LabelSums(loss=losses.sum().float(), scores=scores.detach())


def _preference(
    chosen: torch.Tensor, rejected: torch.Tensor, objective: PairObjective
) -> torch.Tensor:
    """Returns -(1 - s) log sigmoid(m - g) - s log sigmoid(g - m). Here s is the smoothing, g the
    target and m the margin, beta (chosen - rejected).

    DPO: Rafailov et al. 2023, equation 7, with conservative smoothing. SimPO: Meng et al. 2024,
    equation 6.
    """
    margins = objective.beta * (chosen - rejected)
    if objective.gamma:
        margins = margins - objective.gamma
    losses = -(1.0 - objective.smoothing) * F.logsigmoid(margins)
    if objective.smoothing:
        losses = losses - objective.smoothing * F.logsigmoid(-margins)
    return losses


def _odds_ratio(
    chosen: torch.Tensor, rejected: torch.Tensor, objective: PairObjective
) -> torch.Tensor:
    """Returns -beta log sigmoid of the log odds ratio (Hong et al. 2024, equation 7)."""
    return -objective.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(scores: torch.Tensor) -> torch.Tensor:
    """Returns log(p / (1 - p)) of probabilities p, of which ``scores`` are the logarithms."""
    below = scores.clamp_max(_SATURATED)
    return below - torch.log(-torch.expm1(below))


_LOSSES: Mapping[str, Callable[[torch.Tensor, torch.Tensor, PairObjective], torch.Tensor]] = {
    DPO: _preference,
    ORPO: _odds_ratio,
    SIMPO: _preference,
}
