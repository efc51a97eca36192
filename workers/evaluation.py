"""Names of evaluation passes: each global batch is a job with messages of its own."""

from __future__ import annotations

_BATCH_BITS = 20
MAX_BATCHES = 1 << _BATCH_BITS


def job_number(evaluation: int, batch: int) -> int:
    """What keys the messages of one batch of one evaluation."""
    assert 0 <= batch < MAX_BATCHES, f"batch {batch} of an evaluation"
    return (evaluation << _BATCH_BITS) | batch


def evaluation_of(job: int) -> tuple[int, int]:
    """The evaluation and the batch of a :func:`job_number`."""
    return job >> _BATCH_BITS, job & (MAX_BATCHES - 1)
