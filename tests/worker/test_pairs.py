"""Losses and gradients of pairs (DPO) against transformers' model and torch alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from penstock.models.data.batch import Preferences
from penstock.workers.data import job_number
from penstock.workers.epoch import Job
from tests.worker.cluster import TOLERANCE, relative_error

BETA, SMOOTHING = 0.4, 0.1


def job_of(cluster: Any, **changes: Any) -> Job:
    """A job of random pairs with random references."""
    job, rng = cluster.job(**changes), np.random.default_rng(12)
    batches = []
    for batch in job.batches:
        references = rng.uniform(-60.0, -30.0, len(batch.labels))
        preferences = Preferences(references=references, beta=BETA, smoothing=SMOOTHING)
        batches.append(replace(batch, preferences=preferences))
    counted = sum(batch.num_losses for batch in batches)
    return replace(job, batches=batches, counted_tokens=counted)


def expected(cluster: Any, job: Job) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Summed loss, pairs with a positive margin, and gradients of the mean."""
    model, total, right = cluster.original(), 0.0, 0
    for batch in job.batches:
        scores = model(input_ids=torch.from_numpy(batch.input_ids)).logits.log_softmax(-1)
        labels = torch.from_numpy(batch.labels)
        tokens = scores.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        ratios = (tokens * (labels != -100)).sum(1).double()
        ratios = ratios - torch.from_numpy(batch.preferences.references)
        margins = BETA * (ratios[0::2] - ratios[1::2])
        kept = -(1 - SMOOTHING) * F.logsigmoid(margins)
        loss = (kept - SMOOTHING * F.logsigmoid(-margins)).sum()
        (loss / job.counted_tokens).backward()
        total, right = total + loss.item(), right + int((margins > 0).sum())
    return total, right, {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("chunk_rows", "workers", "changes"),
    [
        (None, 1, {"schedule": {"recompute": "none"}}),
        (5, 2, {"schedule": {"recompute": "full"}}),
        (5, 2, {"schedule": {"recompute": "selective", "drop": ["core", "mlp"]}}),
        (7, 2, {"scheme": "zb-h1"}),
        (7, 4, {"schedule": {"replicas": 2, "recompute": "none"}}),
        (5, 2, {"hf": {"tie_word_embeddings": True}, "scheme": "spipe"}),
    ],
)
def test_pairs_have_the_losses_and_gradients_of_torch(
    make_cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    chunk_rows: int | None,
    workers: int,
    changes: dict[str, Any],
) -> None:
    """Whole and chunked heads, recomputation, split backward, replicas and tied embeddings."""
    if chunk_rows is not None:
        monkeypatch.setattr(
            "penstock.shm.table.BlockTable.rows_of_loss", property(lambda table: chunk_rows)
        )
    cluster = make_cluster(workers=workers, micro_batches=4, **changes)
    job = job_of(cluster)
    loss, right, gradients = expected(cluster, job)
    results = cluster.run(job)
    sums = [result.pairs for result in results if result.pairs is not None]
    assert sum(each.counted for each in sums) == job.counted_tokens == 4
    assert sum(each.right for each in sums) == right
    assert sum(result.loss_sum for result in results) == pytest.approx(loss, rel=TOLERANCE)
    assert relative_error(cluster.gradients(), gradients) < 3 * TOLERANCE


def test_evaluations_count_pairs_with_a_margin(make_cluster: Any) -> None:
    cluster = make_cluster(workers=2, micro_batches=4)
    job = job_of(cluster, phase="eval", attempt=job_number(1, 0))
    loss, right, _ = expected(cluster, job)
    results = cluster.run(job)
    assert sum(result.pairs.right for result in results if result.pairs) == right
    assert sum(result.loss_sum for result in results) == pytest.approx(loss, rel=TOLERANCE)
