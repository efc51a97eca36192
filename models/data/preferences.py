"""Pairs of answers: the terms of their losses in NumPy arrays.

Row ``2i`` of a micro-batch has a chosen answer, and row ``2i + 1`` the rejected one.
:mod:`penstock.models.pair_losses` has the losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.config.data import DataConfig
from penstock.config.values import DPO, ORPO


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """The likelihood term of a loss of pairs: ``factor`` times the mean negative log-likelihood of
    the chosen rows. ``prompts``: their prompts count, too. ``mean`` is that over all tokens of a
    global batch, or over pairs of each one's mean.
    """

    factor: float
    prompts: bool
    mean: Literal["tokens", "samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective:
    """A loss of pairs with its settings: ``name`` is a value of ``data.objective``.

    ``smoothing`` is the share of pairs that are taken for swapped. ``likelihood``: None without
    such a term.
    """

    name: str
    beta: float
    gamma: float = 0.0
    smoothing: float = 0.0
    likelihood: Likelihood | None = None

    @classmethod
    def of(cls, data: DataConfig) -> PairObjective:
        """Returns the objective that a configuration names."""
        if data.objective == DPO:
            smoothing = data.dpo.label_smoothing
            return cls(name=DPO, beta=data.dpo.beta, smoothing=smoothing)
        terms = data.orpo if data.objective == ORPO else data.simpo
        likelihood = Likelihood(
            factor=terms.likelihood,
            prompts=terms.likelihood_on == "all",
            mean=terms.likelihood_mean,
        )
        return cls(
            name=data.objective,
            beta=terms.beta,
            gamma=0.0 if data.objective == ORPO else data.simpo.gamma,
            smoothing=0.0 if data.objective == ORPO else data.simpo.label_smoothing,
            likelihood=likelihood if terms.likelihood else None,
        )

    @property
    def has_means(self) -> bool:
        """Returns whether scores are means over an answer's tokens, in place of sums."""
        return self.name != DPO


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preferences:
    """Terms of the losses of a micro-batch's pairs.

    ``references``, (micro_batch,) fp64: the summed log-probabilities of each row's labels by the
    model at the start of the run; None for objectives without a reference. ``text_labels``,
    (micro_batch, sequence) int64: labels of all tokens of the chosen rows, for a likelihood term
    with prompts. ``likelihoods``, (micro_batch / 2,) fp64: the factor of each token's negative
    log-likelihood in the sum of the losses, by chosen row; None without such a term.
    """

    objective: PairObjective
    references: NDArray[np.float64] | None = None
    text_labels: NDArray[np.int64] | None = None
    likelihoods: NDArray[np.float64] | None = None

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The arrays that the head takes."""
        arrays = (self.references, self.text_labels, self.likelihoods)
        return [array for array in arrays if array is not None]

    def margins(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the margin of each pair in nats, (micro_batch / 2,), by the scores of its rows,
        (micro_batch,).
        """
        return self.objective.beta * (scores[0::2] - scores[1::2])
