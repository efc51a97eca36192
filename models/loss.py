"""Cross-entropy and log-probabilities in chunks of rows, so that the logits of a large vocabulary
never exist at once. :mod:`penstock.models.pair_losses` has the losses of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional as F

from penstock.models.data.batch import IGNORED_LABEL, MicroBatch
from penstock.shm.table import LOGITS_BYTES

_LEAST_ROWS = 1024
"""Smallest number of rows of a chunk: with fewer, a product of a large vocabulary waits for its
weights.
"""

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""A model's head: (rows, hidden) in the compute dtype to logits (rows, vocabulary)."""


def loss_rows(vocab_size: int) -> int:
    """Returns the rows of a chunk for new runs: 1,024, or as many as have 64 MiB of fp32 logits."""
    return max(_LEAST_ROWS, LOGITS_BYTES // (4 * vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHead:
    """The head of a model as its loss calls it.

    ``logits_of`` maps (rows, hidden) to logits. ``in_backward`` returns a context with a function
    of the same results. Gradients of several backwards inside add up in the head's parameters, by
    the end of the context at the latest.
    """

    logits_of: LogitsOf
    in_backward: Callable[[], AbstractContextManager[LogitsOf]]


Moved = Callable[[npt.NDArray[Any]], torch.Tensor]
"""Returns an array as a tensor on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Labels of rows, (rows,) int64; -100 counts nothing. ``weights``: fp32 factors of the rows'
    losses, (rows,); None: 1. ``smoothing``: share of a label that all tokens have in equal parts.
    """

    labels: torch.Tensor
    weights: torch.Tensor | None = None
    smoothing: float = 0.0

    @classmethod
    def of(cls, batch: MicroBatch, moved: Moved, smoothing: float) -> Targets:
        """Returns the targets of a micro-batch on the device of ``moved``."""
        weights = batch.label_weights
        return cls(
            labels=moved(batch.labels).reshape(-1),
            weights=None if weights is None else moved(weights).reshape(-1),
            smoothing=smoothing,
        )

    def __getitem__(self, rows: slice) -> Targets:
        """Returns the targets of some of the rows."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, labels=self.labels[rows], weights=weights)


def chunked_cross_entropy(
    head: LossHead, hidden: torch.Tensor, targets: Targets, *, chunk_rows: int
) -> torch.Tensor:
    """Returns the summed negative log-likelihood in nats, a fp32 scalar. It is the sum over rows of
    weight * (log sum_v exp(logits[v]) - target); labels of -100 count nothing. The target is
    (1 - s) logits[label] + s mean_v logits[v] with the smoothing s, as of
    torch.nn.CrossEntropyLoss.

    ``hidden`` is (rows, hidden) in the compute dtype. Logits are widened to fp32. With more than
    ``chunk_rows`` rows, and autograd, the backward computes logits, loss and their gradients, once
    for each chunk. The scalar is NaN until then.
    """
    rows = hidden.shape[0]
    if rows <= chunk_rows:
        return _summed(head.logits_of, hidden, targets)
    if torch.is_grad_enabled():
        anchor = torch.zeros((), requires_grad=True)
        loss: torch.Tensor = _LossInBackward.apply(  # type: ignore[no-untyped-call]
            hidden, anchor, targets, head, chunk_rows
        )
        return loss
    starts = range(0, rows, chunk_rows)
    chunks = [slice(at, at + chunk_rows) for at in starts]
    return _added([_summed(head.logits_of, hidden[chunk], targets[chunk]) for chunk in chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSums:
    """Sums over the counted labels of a micro-batch, as scalars on its device.

    ``loss`` is that of :func:`chunked_cross_entropy`, fp32. ``right`` counts labels with the
    greatest logit, int64; of equal logits the first one counts. None where it was not counted.
    Where rows are pairs, ``loss`` is the sum of the pairs' losses, and ``scores`` are those of each
    sequence, (sequences,) fp64.
    """

    loss: torch.Tensor
    right: torch.Tensor | None = None
    scores: torch.Tensor | None = None


def chunked_scores(
    logits_of: LogitsOf, hidden: torch.Tensor, targets: Targets, *, chunk_rows: int
) -> LabelSums:
    """Returns loss and right predictions without autograd. Arguments, and the bits of the loss, are
    those of :func:`chunked_cross_entropy`.
    """
    losses, right = [], torch.zeros((), dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk_rows):
        chunk = slice(start, start + chunk_rows)
        loss, correct = _scored(logits_of, hidden[chunk], targets[chunk])
        losses.append(loss)
        right = right + correct
    return LabelSums(loss=losses[0] if len(losses) == 1 else _added(losses), right=right)


def chunked_log_probs(
    head: LossHead, hidden: torch.Tensor, labels: torch.Tensor, *, chunk_rows: int
) -> torch.Tensor:
    """Returns the log-probability of each label in nats, (rows,) fp32; 0 for labels of -100.

    Arguments are those of :func:`chunked_cross_entropy`. With more than ``chunk_rows`` rows no
    logits are kept. The backward makes the logits again, chunk by chunk. It is that of a
    cross-entropy with the gradients of the log-probabilities as weights.
    """
    if hidden.shape[0] <= chunk_rows:
        return _log_probs(head.logits_of, hidden, labels)
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
    result: torch.Tensor = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, anchor, labels, head, chunk_rows
    )
    return result


class _LogProbs(torch.autograd.Function):
    """Log-probabilities of several chunks; ``anchor`` as for :class:`_LossInBackward`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: torch.Tensor,
        labels: torch.Tensor,
        head: LossHead,
        chunk_rows: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.labels, ctx.head, ctx.chunk_rows = labels, head, chunk_rows
        starts = range(0, hidden.shape[0], chunk_rows)
        chunks = [slice(at, at + chunk_rows) for at in starts]
        return torch.cat([_log_probs(head.logits_of, hidden[c], labels[c]) for c in chunks])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (hidden,) = ctx.saved_tensors
        targets = Targets(labels=ctx.labels, weights=-gradients[0])
        gradient, _ = _chunks_backward(ctx, hidden, targets, None)
        return gradient, None, None, None, None


class _LossInBackward(torch.autograd.Function):
    """The loss of several chunks. Its backward computes the value with the gradients.

    A forward with the loss would have to keep the logits of all chunks, or make them again.
    ``anchor`` is a scalar that requires a gradient: a head may train above frozen layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: torch.Tensor,
        targets: Targets,
        head: LossHead,
        chunk_rows: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.targets, ctx.head, ctx.chunk_rows = targets, head, chunk_rows
        # An alias of the result: a reference to the result itself would be a cycle.
        ctx.loss = torch.full((), torch.nan, dtype=torch.float32, device=hidden.device)
        alias: torch.Tensor = ctx.loss.detach()
        return alias

    @staticmethod
    def backward(ctx: Any, *weights: Any) -> Any:
        (hidden,) = ctx.saved_tensors
        gradient, losses = _chunks_backward(ctx, hidden, ctx.targets, weights[0])
        ctx.loss.copy_(_added(losses[::-1]))
        return gradient, None, None, None, None


def _chunks_backward(
    ctx: Any, hidden: torch.Tensor, targets: Targets, factor: torch.Tensor | None
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Adds the head's gradients of each chunk's loss times ``factor``. Returns the gradient of
    ``hidden``, and the losses from the last chunk to the first.
    """
    gradient: Any = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    losses = []
    with ctx.head.in_backward() as logits_of:
        # From the last to the first chunk, in the order in which autograd walks a graph.
        for start in reversed(range(0, hidden.shape[0], ctx.chunk_rows)):
            chunk = slice(start, start + ctx.chunk_rows)
            rows = hidden[chunk].detach().requires_grad_(gradient is not None)
            with torch.enable_grad():
                loss = _summed(logits_of, rows, targets[chunk])
            torch.autograd.backward(loss, factor)
            losses.append(loss.detach())
            if gradient is not None:
                gradient[chunk] = rows.grad
    return gradient, losses


def _added(losses: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of fp32 scalars, in their order, which decides its rounding."""
    total = torch.zeros((), dtype=torch.float32, device=losses[0].device)
    for loss in losses:
        total = total + loss
    return total


def _summed(logits_of: LogitsOf, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
    return _entropy(logits_of(hidden).float(), targets)


def _log_probs(logits_of: LogitsOf, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits_of(hidden).float()
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")


def _scored(
    logits_of: LogitsOf, hidden: torch.Tensor, targets: Targets
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits_of(hidden).float()
    # No logit has the index of an ignored label.
    return _entropy(logits, targets), (logits.argmax(dim=-1) == targets.labels).sum()


def _entropy(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    weights = targets.weights
    losses = F.cross_entropy(
        logits,
        targets.labels,
        ignore_index=IGNORED_LABEL,
        reduction="sum" if weights is None else "none",
        label_smoothing=targets.smoothing,
    )
    return losses if weights is None else (losses * weights).sum()
