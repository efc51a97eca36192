"""Objectives of training: the next token, masked tokens, or a function of the user. No torch.

An objective turns rows of tokens, (micro_batch, sequence_length + 1), into a
:class:`~penstock.models.data.batch.MicroBatch`. It is a function of the tokens and of the samples'
numbers in the run. So a repeated attempt, any stage and any micro-batch size get the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config.schema import Config
from penstock.host.errors import ConfigError, reason
from penstock.models.data.batch import IGNORED_LABEL, MicroBatch, places_in_documents
from penstock.models.data.user_modules import import_hint, import_user_module

_REPLACED, _ANY = 0.8, 0.9
"""Two limits for a random number in [0, 1) of each predicted token. Below the first the mask
replaces the token, below the second any token does. Above both the token stays (Devlin et al. 2019,
section 3.1).
"""


class Objective(Protocol):
    """Makes micro-batches."""

    def __call__(self, tokens: NDArray[np.int64], first_sample: int) -> MicroBatch:
        """Returns the micro-batch of int64 ``tokens``, (micro_batch, sequence_length + 1), which
        are the run's samples ``first_sample``, ``first_sample + 1`` and so on.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """Labels are the tokens that follow; each token of ``ends`` ends a document. Without any,
    documents are not kept apart.
    """

    ends: tuple[int, ...] = ()

    def __call__(self, tokens: NDArray[np.int64], first_sample: int) -> MicroBatch:
        """Returns inputs and labels, (micro_batch, sequence_length).

        With documents apart, every document of a sequence (up to its end token) stands alone, like
        packed documents. Positions restart and attention stays inside. The end token has label
        -100, because the next document does not follow from it.
        """
        inputs, labels = np.ascontiguousarray(tokens[:, :-1]), tokens[:, 1:].copy()
        ends = np.isin(inputs, self.ends)
        if not ends.any():
            return MicroBatch(input_ids=inputs, labels=labels)
        labels[ends] = IGNORED_LABEL
        if not ends[:, :-1].any():
            return MicroBatch(input_ids=inputs, labels=labels)
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        positions, documents = places_in_documents(begins)
        return MicroBatch(
            input_ids=inputs, labels=labels, position_ids=positions, document_ids=documents
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Masked tokens as labels: ``fraction`` of all tokens, and at least one of a sequence. ``seed``
    and the sample's number choose the tokens, so the choice differs from epoch to epoch.

    ``mask`` stands for a masked token; any of ``vocab_size`` tokens may be drawn in its place.
    ``ends`` keep documents apart, as in :class:`NextToken`.
    """

    mask: int
    vocab_size: int
    fraction: float
    seed: int
    ends: tuple[int, ...] = ()

    def __call__(self, tokens: NDArray[np.int64], first_sample: int) -> MicroBatch:
        """Returns inputs with masks, and labels (-100 where nothing was masked), (micro_batch,
        sequence_length).
        """
        batch = NextToken(ends=self.ends)(tokens, first_sample)
        inputs = batch.input_ids.copy()
        labels = np.full_like(inputs, IGNORED_LABEL)
        for row in range(len(inputs)):
            self._mask(inputs[row], labels[row], first_sample + row)
        return replace(batch, input_ids=inputs, labels=labels)

    def _mask(self, inputs: NDArray[np.int64], labels: NDArray[np.int64], sample: int) -> None:
        digest = hashlib.blake2b(f"mask/{self.seed}/{sample}".encode(), digest_size=8).digest()
        # Bits of PCG64 are the same in every NumPy; those of its distributions need not be.
        bits = np.random.PCG64(int.from_bytes(digest, "little"))
        drawn = np.asarray(bits.random_raw(3 * len(inputs)), dtype=np.uint64) >> np.uint64(11)
        chosen, kind, other = (drawn.astype(np.float64) / 2.0**53).reshape(3, -1)
        num_masked = max(1, round(self.fraction * len(inputs)))
        places = np.argsort(chosen, kind="stable")[:num_masked]
        labels[places] = inputs[places]
        masked = places[kind[places] < _REPLACED]
        swapped = places[(kind[places] >= _REPLACED) & (kind[places] < _ANY)]
        inputs[masked] = self.mask
        inputs[swapped] = (other[swapped] * self.vocab_size).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Own:
    """A function of the user's, which is given the tokens alone."""

    function: Callable[[NDArray[np.int64]], MicroBatch]

    def __call__(self, tokens: NDArray[np.int64], first_sample: int) -> MicroBatch:
        """Returns the result of the user's function for the tokens."""
        return self.function(tokens)


def own_objective(config: Config) -> Objective | None:
    """Returns the user's function that ``data.objective`` names, ``package.module:function``; None
    for one of Penstock's own.

    Raises:
        ConfigError: there is no such function, or its module cannot be imported.
    """
    name = config.data.objective
    module, colon, function = name.partition(":")
    if not colon:
        return None
    try:
        return Own(getattr(import_user_module(module, config), function))
    except Exception as error:  # any error of the user's module
        raise ConfigError(
            f"data.objective = {name!r}: cannot import it: {reason(error)}; {import_hint(config)}"
        ) from error
