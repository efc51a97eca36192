"""The loss in chunks against chunks that autograd runs twice, and against the whole loss."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.trainer_pt_utils import LabelSmoother

from penstock.models.binding import BoundBlock, gathering
from penstock.models.loss import (
    LogitsOf,
    LossHead,
    Targets,
    chunked_cross_entropy,
    chunked_scores,
    loss_rows,
)
from penstock.shm.table import BlockTable

ROWS, HIDDEN, VOCABULARY, CHUNK = 25, 8, 31, 10
NUM_CHUNKS = 3


class Head:
    """A product with a weight whose gradients add up in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        values = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
        leaf = values.requires_grad_()
        leaf.grad_dtype = torch.float32
        leaf.grad = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.block = BoundBlock(index=0, leaves={"weight": leaf})
        self.rows: list[int] = []
        self.hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
        self.labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
        self.labels[4] = -100
        self.weights: Tensor | None = None
        self.smoothing = 0.0

    @property
    def sums(self) -> Tensor:
        grad = self.block.leaves["weight"].grad
        assert grad is not None
        return grad

    def logits_over(self, block: BoundBlock) -> LogitsOf:
        def logits_of(rows: Tensor) -> Tensor:
            self.rows.append(len(rows))
            return rows @ block.leaves["weight"].t()

        return logits_of

    def loss(self, chunk_rows: int = CHUNK) -> Tensor:
        @contextmanager
        def in_backward() -> Iterator[LogitsOf]:
            with gathering(self.block, self.block) as over:
                yield self.logits_over(over)

        head = LossHead(logits_of=self.logits_over(self.block), in_backward=in_backward)
        targets = Targets(labels=self.labels, weights=self.weights, smoothing=self.smoothing)
        return chunked_cross_entropy(head, self.hidden, targets, chunk_rows=chunk_rows)

    def loss_run_twice(self) -> Tensor:
        """Chunks as checkpoints, whose logits autograd makes a second time in the backward."""
        total = torch.zeros(())
        logits_of = self.logits_over(self.block)
        for rows, labels in zip(self.hidden.split(CHUNK), self.labels.split(CHUNK), strict=True):
            total = total + checkpoint(
                lambda rows, labels: cross_entropy(logits_of(rows), labels),
                rows,
                labels,
                use_reentrant=False,
            )
        return total


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def test_fp32_bits_are_those_of_chunks_that_run_twice() -> None:
    """Sums of two micro-batches, on top of what was there."""
    once, twice = Head(torch.float32), Head(torch.float32)
    for _ in range(2):
        loss, wanted = once.loss(), twice.loss_run_twice()
        (loss * 0.37).backward()
        (wanted * 0.37).backward()
        assert torch.equal(loss, wanted)
    assert once.hidden.grad is not None and twice.hidden.grad is not None
    assert torch.equal(once.hidden.grad, twice.hidden.grad)
    assert torch.equal(once.sums, twice.sums)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk_rows", [CHUNK, ROWS])
def test_weighted_losses_are_those_of_torch(chunk_rows: int, smoothing: float) -> None:
    """Means of three samples by torch's own mean, in fp64; the label of a row counts nothing."""
    head, samples = Head(torch.float32), [slice(0, 4), slice(4, 6), slice(6, ROWS)]
    head.weights = torch.zeros(ROWS)
    for rows, counted in zip(samples, (4, 1, ROWS - 6), strict=True):
        head.weights[rows] = 1 / counted
    head.smoothing = smoothing
    loss = head.loss(chunk_rows)
    loss.backward()
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    hidden = head.hidden.detach().double().requires_grad_()
    logits = hidden @ head.block.leaves["weight"].detach().double().t()
    expected = sum(criterion(logits[rows], head.labels[rows]) for rows in samples)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(head.hidden.grad.double(), hidden.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chunk_rows", [CHUNK, ROWS])
def test_smoothed_losses_are_those_of_torch_and_transformers(chunk_rows: int) -> None:
    head = Head(torch.float32)
    head.smoothing = 0.25
    loss = head.loss(chunk_rows)
    loss.backward()
    hidden = head.hidden.detach().requires_grad_()
    logits = hidden @ head.block.leaves["weight"].detach().t()
    counted = int((head.labels != -100).sum())
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.25)(logits, head.labels) * counted
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(head.hidden.grad, hidden.grad, rtol=1e-5, atol=1e-7)
    theirs = LabelSmoother(epsilon=0.25)({"logits": logits}, head.labels, num_items_in_batch=1)
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("way", ["backward", "without autograd", "scores"])
def test_losses_of_chunks_are_added_from_the_first_to_the_last(way: str) -> None:
    """Weights of several magnitudes give each order of additions another sum."""
    head = Head(torch.float32)
    head.weights = torch.logspace(4.0, -3.0, ROWS)
    rows = zip(head.hidden.detach(), head.labels, head.weights, strict=True)
    logits_of = head.logits_over(head.block)
    losses = [
        F.cross_entropy(logits_of(row[None]).float(), label[None], reduction="none") * weight
        for row, label, weight in rows
        if label != -100
    ]
    expected, backwards = torch.zeros(()), torch.zeros(())
    for first, last in zip(losses, reversed(losses), strict=True):
        expected = expected + first.detach().sum()
        backwards = backwards + last.detach().sum()
    assert not torch.equal(expected, backwards)
    targets = Targets(labels=head.labels, weights=head.weights)
    if way == "scores":
        with torch.no_grad():
            loss = chunked_scores(logits_of, head.hidden, targets, chunk_rows=1).loss
    elif way == "backward":
        loss = head.loss(chunk_rows=1)
        loss.backward()
    else:
        with torch.no_grad():
            loss = head.loss(chunk_rows=1)
    assert torch.equal(loss, expected)


def test_16_bit_gradients_of_a_chunk_reach_fp32_sums_one_by_one() -> None:
    head, plain = Head(torch.bfloat16), Head(torch.bfloat16)
    head.loss().backward()
    weight, sums = plain.block.leaves["weight"].detach(), plain.sums
    for rows, labels in reversed(
        list(zip(plain.hidden.split(CHUNK), plain.labels.split(CHUNK), strict=True))
    ):
        leaf = weight.clone().requires_grad_()
        cross_entropy(rows.detach() @ leaf.t(), labels).backward()
        assert leaf.grad is not None and leaf.grad.dtype is torch.bfloat16
        sums += leaf.grad.float()
    assert torch.equal(head.sums, sums)


def test_each_chunk_is_multiplied_three_times() -> None:
    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops.aten.mm.default:
                self.counts["mm"] += 1
            return func(*args, **(kwargs or {}))

    head = Head(torch.float32)
    with Products() as forward:
        loss = head.loss()
    assert (forward.counts["mm"], head.rows, loss.isnan().item()) == (0, [], True)
    with Products() as backward:
        loss.backward()
    assert (backward.counts["mm"], head.rows) == (3 * NUM_CHUNKS, [5, 10, 10])
    torch.testing.assert_close(loss, head.loss(chunk_rows=ROWS))


def test_a_head_trains_above_frozen_layers_and_layers_train_below_a_frozen_head() -> None:
    above, below = Head(torch.float32), Head(torch.float32)
    above.hidden = above.hidden.detach()
    before = above.sums.clone()
    above.loss().backward()
    assert not torch.equal(above.sums, before)
    frozen = below.block.leaves["weight"].detach()
    below.block = BoundBlock(index=0, leaves={"weight": frozen})
    below.loss().backward()
    wanted = Head(torch.float32)
    wanted.loss(chunk_rows=ROWS).backward()
    torch.testing.assert_close(below.hidden.grad, wanted.hidden.grad)


def test_without_autograd_the_value_is_there_at_once() -> None:
    head = Head(torch.float32)
    with torch.no_grad():
        chunks, whole = head.loss(), head.loss(chunk_rows=ROWS)
    torch.testing.assert_close(chunks, whole)
    assert head.rows == [10, 10, 5, 25]


def test_a_loss_that_nobody_runs_backward_is_freed() -> None:
    head = Head(torch.float32)
    hidden = head.hidden * 1.0
    freed = weakref.ref(hidden)
    head.hidden = hidden
    loss = head.loss()
    gc.disable()
    try:
        del loss, hidden
        head.hidden = head.labels
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("vocab_size", "rows", "older"), [(256, 65_536, 65_536), (32_000, 1_024, 524)]
)
def test_rows_follow_from_the_vocabulary_and_older_tables_keep_theirs(
    vocab_size: int, rows: int, older: int, make_case: Any
) -> None:
    assert loss_rows(vocab_size) == rows
    old = replace(make_case("gpt2").table, vocab_size=vocab_size, loss_rows=None)
    assert old.rows_of_loss == older
    assert "loss_rows" not in old.to_json()
    new = replace(old, loss_rows=rows)
    assert BlockTable.from_json(new.to_json()).rows_of_loss == rows


@pytest.mark.parametrize("chunk_rows", [CHUNK, ROWS, 4 * ROWS])
def test_right_predictions_are_counted_and_the_loss_keeps_its_bits(chunk_rows: int) -> None:
    head = Head(torch.float32)
    logits_of = head.logits_over(head.block)
    with torch.no_grad():
        logits = logits_of(head.hidden)
        head.labels[7:15] = logits[7:15].argmax(-1)
        head.labels[9] = -100
        sums = chunked_scores(
            logits_of, head.hidden, Targets(labels=head.labels), chunk_rows=chunk_rows
        )
        assert torch.equal(sums.loss, head.loss(chunk_rows))
    counted = head.labels != -100
    right = int((logits.argmax(-1)[counted] == head.labels[counted]).sum())
    assert sums.right is not None and int(sums.right) == right >= 7
