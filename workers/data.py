"""Training data as a function of (seed, samples consumed): no state of the data is saved.

A token file is cut into sequences: sequence ``i`` is ``tokens[iT : iT+T+1]``. The objective
(:mod:`penstock.models.data.objectives`) makes inputs and labels of them. A file of rows
(:mod:`penstock.models.data.rows.row_file`) has a sequence in each row. Sample ``k`` of the run is a
sequence of pass ``k // n`` over all ``n``; each pass has its own order.

The end of the file has the job numbers of evaluations: each global batch of an evaluation is a job
with its own messages. No torch in this module; :mod:`penstock.models.prepare` writes token files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config.evaluation import EvaluationSet
from penstock.config.schema import Config
from penstock.config.values import MASKED, PAIR
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, parse_json
from penstock.models.data.batch import (
    IGNORED_LABEL,
    MicroBatch,
    weighted_by_sample,
    with_likelihoods,
)
from penstock.models.data.chunks import Checksums
from penstock.models.data.marks import end_ids
from penstock.models.data.objectives import Masked, NextToken, Objective, own_objective
from penstock.models.data.preferences import PairObjective, Preferences
from penstock.models.data.rows.references import read_references
from penstock.models.data.rows.row_file import RowFile, RowLayout, Tokens
from penstock.protocol.run.checksums import read_checked

_log = logging.getLogger(__name__)
Batches = tuple[list[MicroBatch], int]
"""Micro-batches of one global batch and the number of its losses: counted tokens, or pairs."""

_ROUNDS = 6
"""Rounds of the Feistel network. A change alters the order of every run's data."""


class Dataset(Protocol):
    """The sequences of a split."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences of a pass."""

    def read(self, position: int, count: int, micro_batch: int) -> list[MicroBatch]:
        """Returns samples ``position … position + count - 1`` of the run, ``micro_batch`` in each
        micro-batch.

        Raises:
            StateError: the data have changed since the run was prepared.
        """


def open_dataset(data_dir: Path, split: str, config: Config) -> Dataset:
    """Returns the ``train`` split, or that of an evaluation set, of ``RUN_DIR/data``. Splits are
    those that ``penstock.models.prepare`` left.

    Raises:
        StateError: there is no such split, or its files are damaged.
    """
    with _usable(data_dir, split):
        meta = _entry(data_dir, split)
        layout = RowLayout.of(meta)
        if layout is None:
            return TokenDataset.open(data_dir, split, config)
        path = data_dir / meta["path"]
        pairs = Pairs.open(data_dir, meta, layout, config) if config.trains_on_pairs else None
        if layout.length != config.data.sequence_length:
            raise StateError(
                f"{data_dir}: has rows of {layout.length} tokens, and data.sequence_length is"
                f" {config.data.sequence_length}; start a new run in another run.dir"
            )
        file = RowFile(path, layout, Checksums.open(path, data_dir, meta["sums"]))
        size = layout.rows if pairs is None else layout.rows // PAIR
        return RowDataset(file, _order(config, split, size), pairs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """The terms of the loss of pairs of rows. ``references``, (rows,) fp64: see
    :class:`~penstock.models.data.preferences.Preferences`; None before they are computed, and
    without a reference.
    """

    objective: PairObjective
    references: NDArray[np.float64] | None

    @classmethod
    def open(
        cls, data_dir: Path, entry: dict[str, Any], layout: RowLayout, config: Config
    ) -> Pairs:
        """Returns the terms of a split; ``entry`` is that of ``meta.json``.

        Raises:
            StateError: the references have changed since they were computed.
        """
        return cls(
            objective=PairObjective.of(config.data),
            references=read_references(data_dir, entry, layout),
        )

    def preferences(
        self, numbers: NDArray[np.int64], rows: Sequence[Tokens], batch: MicroBatch
    ) -> Preferences | None:
        """Returns the terms of rows, which are whole pairs, with their tokens and their
        micro-batch; None before the references are computed.
        """
        objective = self.objective
        if self.references is None and not objective.has_means:
            return None
        texts = objective.likelihood is not None and objective.likelihood.prompts
        return Preferences(
            objective=objective,
            references=None if self.references is None else self.references[numbers],
            text_labels=_labels_of_texts(rows, batch) if texts else None,
        )


def _labels_of_texts(rows: Sequence[Tokens], batch: MicroBatch) -> NDArray[np.int64]:
    """Returns labels of all tokens of the chosen rows, in the shape of the batch's labels."""
    labels = np.full_like(batch.labels, IGNORED_LABEL)
    for number in range(0, len(rows), PAIR):
        end = len(rows[number]) - 1
        labels[number, :end] = batch.input_ids[number, 1 : end + 1]
    return labels


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """An order of ``size`` sequences for each pass; the sequences' own without ``shuffle``."""

    size: int
    seed: int
    shuffle: bool

    def indices(self, position: int, count: int) -> NDArray[np.int64]:
        """Returns the sequences of samples ``position … position + count - 1`` of the run, (count,)
        int64.
        """
        samples = np.arange(position, position + count, dtype=np.int64)
        indices = samples % self.size
        if not self.shuffle:
            return indices
        passes = samples // self.size
        for number in np.unique(passes):
            chosen = passes == number
            indices[chosen] = _permuted(indices[chosen], self.size, f"{self.seed}/{number}")
        return indices


@dataclass(frozen=True, slots=True)
class RowDataset:
    """Rows of a file in an order of their own per pass; ``order`` is that of pairs with ``pairs``.

    Two rows of a pair follow one another. Positions of pairs are even.
    """

    file: RowFile
    order: SampleOrder
    pairs: Pairs | None = None

    @property
    def num_sequences(self) -> int:
        """The number of rows."""
        return self.order.size * (1 if self.pairs is None else PAIR)

    def rows(self, position: int, count: int) -> NDArray[np.int64]:
        """Returns the numbers of rows ``position … position + count - 1`` of the run, (count,)."""
        if self.pairs is None:
            return self.order.indices(position, count)
        first, end = position // PAIR, -(-(position + count) // PAIR)
        chosen = PAIR * self.order.indices(first, end - first)
        skipped = position - PAIR * first
        return np.stack([chosen, chosen + 1], axis=1).reshape(-1)[skipped : skipped + count]

    def read(self, position: int, count: int, micro_batch: int) -> list[MicroBatch]:
        """Returns samples as micro-batches; see :class:`Dataset`."""
        layout = self.file.layout
        numbers = self.rows(position, count)
        rows, weights = [], []
        for number in numbers.tolist():
            rows.append(self.file.row(number))
            weights.append(self.file.weights(number))
        batches = []
        for start in range(0, count, micro_batch):
            part = slice(start, start + micro_batch)
            batch = layout.batch(rows[part], weights[part])
            if self.pairs is not None:
                preferences = self.pairs.preferences(numbers[part], rows[part], batch)
                batch = dataclasses.replace(batch, preferences=preferences)
            batches.append(batch)
        return batches


class TokenDataset:
    """Sequences of a memory-mapped token file in an order of their own per pass.

    ``first_token`` and ``num_tokens`` bound the part of the file that belongs to the split.
    """

    def __init__(
        self,
        path: Path,
        *,
        token_dtype: str,
        sequence_length: int,
        seed: int,
        shuffle: bool,
        first_token: int = 0,
        num_tokens: int | None = None,
        objective: Objective | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        """Maps the file of little-endian ids of ``token_dtype``.

        With ``checksums`` each read is compared with them; ``objective`` makes micro-batches, of
        next tokens by default. Pages are read when a batch needs them.

        Raises:
            StateError: the file is missing or too short.
            ConfigError: the file holds not even one sequence.
        """
        try:
            tokens = np.memmap(path, dtype=np.dtype(token_dtype).newbyteorder("<"), mode="r")
        except (OSError, ValueError) as error:
            raise StateError(f"token file {path}: cannot map it: {error}") from error
        end = len(tokens) if num_tokens is None else first_token + num_tokens
        if end > len(tokens):
            raise StateError(f"token file {path} has {len(tokens)} tokens, expected at least {end}")
        self._tokens = tokens[first_token:end]
        self._first_token, self._token_bytes = first_token, tokens.itemsize
        self._checksums = checksums
        self.sequence_length = sequence_length
        self.num_sequences = max(0, (len(self._tokens) - 1) // sequence_length)
        if self.num_sequences == 0:
            raise ConfigError(
                f"data.sequence_length = {sequence_length}: {path} has {len(self._tokens)} tokens;"
                f" one sequence takes {sequence_length + 1}"
            )
        self.order = SampleOrder(size=self.num_sequences, seed=seed, shuffle=shuffle)
        self.objective = NextToken() if objective is None else objective

    @classmethod
    def open(cls, data_dir: Path, split: str, config: Config) -> TokenDataset:
        """Returns the ``train`` or ``eval`` split that ``penstock.models.prepare`` left in
        ``RUN_DIR/data``.

        Raises:
            StateError: there is no such split, or its files are damaged.
        """
        with _usable(data_dir, split):
            meta = _entry(data_dir, split)
            path = data_dir / meta["path"]
            checksums = None
            if "sums" in meta:
                checksums = Checksums.open(path, data_dir, meta["sums"])
            else:
                _log.warning("%s has no checksums (prepared by an older Penstock)", path)
            return cls(
                path,
                token_dtype=meta["token_dtype"],
                sequence_length=config.data.sequence_length,
                seed=config.run.seed,
                shuffle=_shuffles(config, split),
                first_token=meta["first_token"],
                num_tokens=meta["num_tokens"],
                objective=_objective(config, meta),
                checksums=checksums,
            )

    def read(self, position: int, count: int, micro_batch: int) -> list[MicroBatch]:
        """Returns samples as micro-batches; see :class:`Dataset`."""
        tokens = self.batch(position, count)
        return [
            self.objective(tokens[start : start + micro_batch], position + start)
            for start in range(0, count, micro_batch)
        ]

    def batch(self, position: int, count: int) -> NDArray[np.int64]:
        """Returns samples ``position … position + count - 1`` as tokens, (count, sequence_length +
        1) int64, copied out of the file.

        Raises:
            StateError: the tokens have changed since the run was prepared.
        """
        starts = self.order.indices(position, count) * self.sequence_length
        if self._checksums is not None:
            for start in (starts + self._first_token).tolist():
                end = start + self.sequence_length + 1
                self._checksums.check(start * self._token_bytes, end * self._token_bytes)
        # astype copies, so that no batch keeps pages of the file mapped.
        return np.stack(
            [self._tokens[s : s + self.sequence_length + 1].astype(np.int64) for s in starts]
        )


def micro_batches(
    dataset: Dataset,
    data_position: int,
    global_batch: int,
    micro_batch: int,
    *,
    by_sample: bool = False,
) -> Batches:
    """Returns the micro-batches of the global batch that starts at a data position, and the number
    of its losses.

    ``data_position`` counts the samples consumed before; the batch consumes ``global_batch`` of
    them. ``by_sample``: labels have weights, by which samples count alike in the loss.
    """
    batches = dataset.read(data_position, global_batch, micro_batch)
    if by_sample:
        batches = weighted_by_sample(batches)
    batches = with_likelihoods(batches)
    return batches, sum(batch.num_losses for batch in batches)


def training_batches(dataset: Dataset, position: int, count: int, config: Config) -> Batches:
    """Returns the micro-batches of ``count`` samples at a position of the training data, and the
    number of their losses, with the weights of ``train.loss_mean``.
    """
    train = config.train
    by_sample = train.loss_mean == "samples"
    return micro_batches(dataset, position, count, train.micro_batch, by_sample=by_sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutData:
    """The data of an evaluation set in global batches of ``global_batch`` rows.

    ``repeats``: batches begin again at the first row. Otherwise each row counts once: rows that
    fill up the last batch have no labels. Weights of labels are left out: means of evaluations are
    plain.
    """

    dataset: Dataset
    num_batches: int
    global_batch: int
    micro_batch: int
    repeats: bool

    @classmethod
    def open(cls, data_dir: Path, each: EvaluationSet, config: Config) -> HeldOutData:
        """Returns the data that the preparation left in ``RUN_DIR/data``.

        Raises:
            StateError: there are none, or files are damaged.
        """
        dataset, train = open_dataset(data_dir, each.split, config), config.train
        whole = -(-dataset.num_sequences // train.global_batch)
        if each.batches is None:
            num_batches = whole
        else:
            num_batches = each.batches if each.repeats else min(each.batches, whole)
        return cls(
            dataset=dataset,
            num_batches=num_batches,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            repeats=each.repeats,
        )

    def batches(self, index: int) -> Batches:
        """Returns the global batch ``index``."""
        position = index * self.global_batch
        batches, counted = micro_batches(
            self.dataset, position, self.global_batch, self.micro_batch
        )
        batches = [dataclasses.replace(batch, label_weights=None) for batch in batches]
        rows = self.dataset.num_sequences - position
        if self.repeats or rows >= self.global_batch:
            return batches, counted
        starts = range(0, self.global_batch, self.micro_batch)
        batches = [
            _without_labels(batch, max(0, rows - start))
            for start, batch in zip(starts, batches, strict=True)
        ]
        batches = with_likelihoods(batches)
        return batches, sum(batch.num_losses for batch in batches)


def _without_labels(batch: MicroBatch, first: int) -> MicroBatch:
    """Returns a micro-batch of which rows from ``first`` on do not count."""
    labels = batch.labels.copy()
    labels[first:] = IGNORED_LABEL
    return dataclasses.replace(batch, labels=labels)


def _entry(data_dir: Path, split: str) -> dict[str, Any]:
    meta = parse_json(read_checked(data_dir.parent, f"{data_dir.name}/meta.json"))
    entry: dict[str, Any] = meta[split]
    return entry


@contextmanager
def _usable(data_dir: Path, split: str) -> Iterator[None]:
    """Turns errors about damaged files inside the block into StateError."""
    try:
        yield
    except (OSError, *DAMAGED) as error:
        raise StateError(
            f"{data_dir}: no usable {split} split ({error!r}); delete the directory and start again"
        ) from error


def _order(config: Config, split: str, size: int) -> SampleOrder:
    return SampleOrder(size=size, seed=config.run.seed, shuffle=_shuffles(config, split))


def _shuffles(config: Config, split: str) -> bool:
    return config.data.shuffle and split == "train"


def _objective(config: Config, meta: dict[str, Any]) -> Objective:
    """Returns the configured objective; ``meta`` is the split's entry of ``meta.json``.

    Raises:
        ConfigError: a function of the user cannot be imported.
    """
    data = config.data
    ends = end_ids(meta["eos"]) if data.document_masks else ()
    if data.objective == MASKED:
        return Masked(
            mask=meta["mask"],
            vocab_size=meta["vocab_size"],
            fraction=data.mask_fraction,
            seed=config.run.seed,
            ends=ends,
        )
    return own_objective(config) or NextToken(ends=ends)


def _permuted(indices: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Returns the places of ``indices``, (count,), in a keyed permutation of ``range(size)``,
    computed without listing it.

    A balanced Feistel network permutes the next power of four; values that leave the range are sent
    through again until they are back (cycle walking; Black and Rogaway, 2002), at most four times
    on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, key: str) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        mixed = _mixed(right ^ np.uint64(int.from_bytes(digest, "little")))
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns a mix of each value in which every output bit depends on every input bit: the
    finalizer of SplitMix64 (Steele et al., 2014).
    """
    # Products wrap around modulo 2**64, as the algorithm wants it.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_BATCH_BITS = 20
MAX_BATCHES = 1 << _BATCH_BITS


def job_number(evaluation: int, batch: int) -> int:
    """Returns the number that keys the messages of one batch of one evaluation."""
    assert 0 <= batch < MAX_BATCHES, f"batch {batch} of an evaluation"
    return (evaluation << _BATCH_BITS) | batch


def evaluation_of(job: int) -> tuple[int, int]:
    """Returns the evaluation and the batch of a :func:`job_number`."""
    return job >> _BATCH_BITS, job & (MAX_BATCHES - 1)
