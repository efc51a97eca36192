"""Losses and gradients of pairs against transformers' model and torch alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from penstock.models.data.batch import with_likelihoods
from penstock.models.data.preferences import Likelihood, PairObjective, Preferences
from penstock.workers.data import job_number
from penstock.workers.epoch import Job
from tests.worker.cluster import TOLERANCE, relative_error

DPO = PairObjective(name="dpo", beta=0.4, smoothing=0.1)
ORPO = PairObjective(
    name="orpo", beta=0.9, likelihood=Likelihood(factor=1.0, prompts=True, mean="tokens")
)
SIMPO = PairObjective(
    name="simpo",
    beta=2.0,
    gamma=0.5,
    smoothing=0.1,
    likelihood=Likelihood(factor=0.3, prompts=False, mean="samples"),
)


def job_of(cluster: Any, objective: PairObjective = DPO, **changes: Any) -> Job:
    """A job of random pairs: with random references, or with prompts in the chosen rows."""
    job, rng = cluster.job(**changes), np.random.default_rng(12)
    batches = []
    for batch in job.batches:
        references = rng.uniform(-60.0, -30.0, len(batch.labels))
        labels, texts = batch.labels, None
        if objective is ORPO:
            texts, labels = batch.labels.copy(), batch.labels.copy()
            texts[1::2], labels[:, :2] = -100, -100
        preferences = Preferences(
            objective=objective,
            references=references if objective is DPO else None,
            text_labels=texts,
        )
        batches.append(replace(batch, labels=labels, preferences=preferences))
    counted = sum(batch.num_losses for batch in batches)
    return replace(job, batches=with_likelihoods(batches), counted_tokens=counted)


def expected(cluster: Any, job: Job) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Summed loss, pairs with a positive margin, and gradients of the mean."""
    model, total, right = cluster.original(), 0.0, 0
    texts = 0
    for batch in job.batches:
        given = batch.preferences
        kept = batch.labels if given.text_labels is None else given.text_labels
        texts += int((kept[0::2] != -100).sum())
    for batch in job.batches:
        scores = model(input_ids=torch.from_numpy(batch.input_ids)).logits.log_softmax(-1)
        given, objective = batch.preferences, batch.preferences.objective
        labels = torch.from_numpy(batch.labels)
        tokens = scores.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        sums = (tokens * (labels != -100)).sum(1).double()
        means = sums / (labels != -100).sum(1)
        ratios = means if objective is not DPO else sums - torch.from_numpy(given.references)
        margins = objective.beta * (ratios[0::2] - ratios[1::2])
        right += int((margins > 0).sum())
        if objective is ORPO:
            whole = torch.from_numpy(given.text_labels)
            whole = torch.where(whole == -100, labels, whole)[0::2]
            likelihood = scores[0::2].gather(-1, whole.clamp_min(0)[..., None])[..., 0]
            likelihood = (likelihood * (whole != -100)).sum()
            odds = means - torch.log1p(-means.exp())
            loss = -objective.beta * F.logsigmoid(odds[0::2] - odds[1::2]).sum()
            loss = loss - likelihood * job.counted_tokens / texts
        else:
            smoothing, aim = objective.smoothing, margins - objective.gamma
            each = -(1 - smoothing) * F.logsigmoid(aim) - smoothing * F.logsigmoid(-aim)
            loss = each.sum()
            if objective is SIMPO:
                loss = loss - 0.3 * means[0::2].sum()
        (loss / job.counted_tokens).backward()
        total += loss.item()
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
@pytest.mark.parametrize("objective", [DPO, ORPO, SIMPO], ids=["dpo", "orpo", "simpo"])
def test_pairs_have_the_losses_and_gradients_of_torch(
    make_cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    objective: PairObjective,
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
    job = job_of(cluster, objective)
    loss, right, gradients = expected(cluster, job)
    results = cluster.run(job)
    sums = [result.pairs for result in results if result.pairs is not None]
    assert sum(each.counted for each in sums) == job.counted_tokens == 4
    assert sum(each.right for each in sums) == right
    assert sum(result.loss_sum for result in results) == pytest.approx(loss, rel=TOLERANCE)
    assert relative_error(cluster.gradients(), gradients) < 3 * TOLERANCE


@pytest.mark.parametrize("objective", [DPO, ORPO, SIMPO], ids=["dpo", "orpo", "simpo"])
def test_evaluations_count_pairs_with_a_margin(make_cluster: Any, objective: PairObjective) -> None:
    cluster = make_cluster(workers=2, micro_batches=4)
    job = job_of(cluster, objective, phase="eval", attempt=job_number(1, 0))
    loss, right, _ = expected(cluster, job)
    results = cluster.run(job)
    assert sum(result.pairs.right for result in results if result.pairs) == right
    assert sum(result.loss_sum for result in results) == pytest.approx(loss, rel=TOLERANCE)
