"""The mean of a step's loss, over tokens or samples, against torch's means of samples alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import CrossEntropyLoss

from penstock.models.data.batch import MicroBatch, weighted_by_sample
from penstock.models.data.rows.row_file import batch_of, marked
from penstock.workers.data import job_number
from penstock.workers.epoch import Job
from tests.worker.cluster import LLAMA, SEQUENCE, TOLERANCE, relative_error

LENGTHS = (3, 9, 5, 7, 4, 8, 2, 10)
"""Tokens of samples. Neighbours fill a row; the tokens of each sample's first third do not count,
and no token of the fourth sample does.
"""


def samples() -> list[tuple[list[int], list[int]]]:
    """Ids and labels, unshifted, of the same positions."""
    rng = np.random.default_rng(3)
    made = []
    for number, length in enumerate(LENGTHS):
        ids = rng.integers(0, LLAMA["vocab_size"], length).tolist()
        masked = length if number == 3 else max(1, length // 3)
        made.append((ids, [-100] * masked + ids[masked:]))
    return made


def spans_of(ids: list[int], labels: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns ids, and the one span of tokens that count."""
    first = labels.count(-100)
    return ids, [(first, len(ids))] if first < len(ids) else []


def job_of(cluster: Any, rows: list[list[int]], number: int = 1) -> Job:
    """A job of rows of samples, by their numbers, in the configured number of micro-batches."""
    made = samples()
    tokens = [np.concatenate([marked(*spans_of(*made[n])) for n in row]) for row in rows]
    size = len(rows) // cluster.config.train.num_microbatches
    parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    batches: list[MicroBatch] = weighted_by_sample([batch_of(p, SEQUENCE, 0) for p in parts])
    counted = sum(batch.counted_tokens for batch in batches)
    return replace(cluster.job(attempt=number), batches=batches, counted_tokens=counted)


PACKED = [[0, 1], [2, 3], [4, 5], [6, 7]]
ALONE = [[n] for n in (5, 2, 7, 0, 1, 3, 6, 4)]


def expected(cluster: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a plain loop over the samples, one at a time."""
    model, losses = cluster.original(), []
    criterion = CrossEntropyLoss(label_smoothing=cluster.config.train.label_smoothing)
    for ids, labels in samples():
        if max(labels) < 0:
            continue
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        losses.append(criterion(logits, torch.tensor(labels[1:])))
    loss = sum(losses) / len(losses)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("micro_batches", "workers", "schedule", "rows", "smoothing"),
    [
        (2, 2, {}, PACKED, 0.0),
        (4, 2, {}, ALONE, 0.3),
        (4, 1, {"recompute": "none"}, PACKED, 0.3),
        (4, 4, {"replicas": 2}, ALONE, 0.0),
    ],
)
def test_samples_count_alike(
    make_cluster: Any,
    micro_batches: int,
    workers: int,
    schedule: dict[str, Any],
    rows: list[list[int]],
    smoothing: float,
) -> None:
    """Packed and unpacked, for any micro-batches, workers and replicas, and smoothed labels."""
    cluster = make_cluster(
        workers=workers,
        micro_batches=micro_batches,
        schedule=schedule,
        label_smoothing=smoothing,
    )
    loss, gradients = expected(cluster)
    job = job_of(cluster, rows)
    total, tokens = cluster.train(job)
    assert tokens == job.counted_tokens
    assert total / tokens == pytest.approx(loss, rel=TOLERANCE)
    assert relative_error(cluster.gradients(), gradients) < 3 * TOLERANCE
    plain = replace(job, number=2, batches=[replace(b, label_weights=None) for b in job.batches])
    assert cluster.train(plain)[0] / tokens != pytest.approx(loss, rel=1e-4), "a mean over tokens"


def test_smoothed_losses_of_steps_and_plain_ones_of_evaluations(make_cluster: Any) -> None:
    """The mean over tokens, against transformers' model and torch's cross-entropy."""
    cluster = make_cluster(label_smoothing=0.2, hf={"tie_word_embeddings": True})
    job, model, total = cluster.job(), cluster.original(), 0.0
    criterion = CrossEntropyLoss(reduction="sum", label_smoothing=0.2)
    for batch in job.batches:
        logits = model(input_ids=torch.from_numpy(batch.input_ids)).logits
        loss = criterion(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        (loss / job.counted_tokens).backward()
        total += loss.item()
    assert cluster.train(job)[0] == pytest.approx(total, rel=TOLERANCE)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_error(cluster.gradients(), expected) < 3 * TOLERANCE
    evaluation = cluster.job(phase="eval", attempt=job_number(1, 0))
    plain, _ = cluster.reference(evaluation)
    assert cluster.train(evaluation)[0] == pytest.approx(plain, rel=TOLERANCE)
    assert abs(plain / total - 1) > 1e-5, "both losses are the same"
