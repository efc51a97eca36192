"""Cross-entropy in chunks of rows, so that the logits of a large vocabulary never exist at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.models.data.batch import IGNORED_LABEL

CHUNK_BYTES = 64 * 2**20
"""Upper limit of one chunk's logits in fp32."""


def chunked_cross_entropy(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Returns the summed negative log-likelihood in nats, a fp32 scalar: the sum over rows of
    log sum_v exp(logits[v]) - logits[label]. Labels of -100 count nothing.

    ``hidden`` is (rows, hidden) in the compute dtype, ``labels`` (rows,) int64. ``logits_of`` maps
    (chunk, hidden) to (chunk, vocabulary), which is widened to fp32. A chunk's logits take at most
    ``chunk_bytes`` in fp32, or one row's. With more than one chunk each chunk's logits are computed
    again in the backward, so memory is bounded by one chunk in both directions; ``logits_of`` must
    allow being called then.
    """
    rows = hidden.shape[0]
    chunk_rows = max(1, chunk_bytes // (4 * vocab_size))
    if rows <= chunk_rows:
        return _summed(logits_of, hidden, labels)
    # Chunks are added one after the other, in fp32: the rounding of the sum follows from their
    # size.
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, rows, chunk_rows):
        part, wanted = hidden[start : start + chunk_rows], labels[start : start + chunk_rows]
        if torch.is_grad_enabled():
            # The head has no dropout, so no random state needs to be kept for the second
            # computation.
            total = total + checkpoint(
                _summed, logits_of, part, wanted, use_reentrant=False, preserve_rng_state=False
            )
        else:
            total = total + _summed(logits_of, part, wanted)
    return total


def _summed(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(
        logits_of(hidden).float(), labels, ignore_index=IGNORED_LABEL, reduction="sum"
    )
