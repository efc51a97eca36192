"""Data order as a function of (seed, samples consumed), and what becomes of a sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.schema import Config, parse_config
from penstock.host.errors import ConfigError, StateError
from penstock.models.data.batch import MicroBatch, weighted_by_sample
from penstock.models.data.objectives import Masked, NextToken, Own, own_objective
from penstock.workers.data import TokenDataset, micro_batches

EOS = 9
GOLDEN = (
    [16, 149, 57, 42, 134, 92, 114, 171],
    [57, 129, 152, 13, 134, 83, 148, 12],
)
GOLDEN_MASKS = [15, 17, 32, 35, 51, 64, 68, 69, 70, 76, 80, 86, 87, 89, 98]

SETTINGS = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,001 tokens; token ``i`` is ``i``."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.bin"
    np.arange(2001, dtype="<u2").tofile(path)
    return path


def dataset(path: Path, length: int = 10, **options: object) -> TokenDataset:
    defaults = {"token_dtype": "uint16", "sequence_length": length, "seed": 1, "shuffle": True}
    return TokenDataset(path, **{**defaults, **options})


@SETTINGS
@given(length=st.integers(1, 700), seed=st.integers(0, 2**63 - 1), number=st.integers(0, 3))
def test_every_sequence_once_per_pass(token_file, length, seed, number) -> None:
    data = dataset(token_file, length, seed=seed)
    assert data.num_sequences == 2000 // length
    order = data.order.indices(number * data.num_sequences, data.num_sequences)
    assert sorted(order.tolist()) == list(range(data.num_sequences))


@SETTINGS
@given(
    start=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    shuffle=st.booleans(),
)
def test_order_does_not_depend_on_the_batch_size(token_file, start, sizes, shuffle) -> None:
    data = dataset(token_file, 10, shuffle=shuffle)
    positions = start + np.cumsum([0, *sizes])
    parts = [data.order.indices(int(p), n) for p, n in zip(positions, sizes, strict=False)]
    whole = data.order.indices(start, sum(sizes))
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_order_is_fixed_for_good(token_file) -> None:
    """A golden value: runs resumed with a later version must see the same data."""
    data = dataset(token_file, 10, seed=1234)
    assert data.order.indices(0, 8).tolist() == GOLDEN[0]
    assert data.order.indices(200, 8).tolist() == GOLDEN[1]


def test_passes_and_seeds_have_orders_of_their_own(token_file) -> None:
    orders = [
        dataset(token_file, 10, seed=seed).order.indices(position, 200).tolist()
        for seed in (1, 2)
        for position in (0, 200)
    ]
    assert len({tuple(order) for order in orders}) == 4
    unshuffled = dataset(token_file, 10, shuffle=False)
    assert unshuffled.order.indices(198, 4).tolist() == [198, 199, 0, 1]


def test_order_is_well_mixed(tmp_path) -> None:
    np.zeros(100_001, dtype="<u2").tofile(tmp_path / "t.bin")
    order = dataset(tmp_path / "t.bin", 10).order.indices(0, 10_000)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    halves = (order[:5000] < 5000).mean()
    assert 0.45 < halves < 0.55


def test_sequences_are_the_design_s(token_file) -> None:
    data = dataset(token_file, 4, shuffle=False)
    batches, counted = micro_batches(data, 2, 4, 2)
    assert [b.input_ids.tolist() for b in batches] == [
        [[8, 9, 10, 11], [12, 13, 14, 15]],
        [[16, 17, 18, 19], [20, 21, 22, 23]],
    ]
    assert batches[1].labels.tolist() == [[17, 18, 19, 20], [21, 22, 23, 24]]
    assert counted == 16
    assert all(b.input_ids.dtype == b.labels.dtype == np.int64 for b in batches)
    assert batches[0].position_ids is batches[0].document_ids is batches[0].attention_mask is None


def test_documents_of_a_packed_sequence(tmp_path) -> None:
    tokens = [1, 2, EOS, 3, EOS, 4, 5, 6, 7, 8, 1, EOS, 2]
    np.array(tokens, dtype="<u2").tofile(tmp_path / "t.bin")
    options = {"shuffle": False, "objective": NextToken(ends=(EOS,))}
    data = dataset(tmp_path / "t.bin", 6, **options)
    (batch,), counted = micro_batches(data, 0, 2, 2)
    assert batch.input_ids.tolist() == [[1, 2, 9, 3, 9, 4], [5, 6, 7, 8, 1, 9]]
    assert batch.labels.tolist() == [[2, 9, -100, 9, -100, 5], [6, 7, 8, 1, 9, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0]]
    assert counted == batch.counted_tokens == 9
    (single,), counted = micro_batches(data, 1, 1, 1)
    assert single.position_ids is None, "one document needs no mask"
    assert counted == 5
    (plain,), counted = micro_batches(dataset(tmp_path / "t.bin", 6, shuffle=False), 0, 2, 2)
    assert plain.document_ids is None and counted == 12


def means_of_samples(batches: list[MicroBatch], weights: bool) -> float:
    """The mean of the samples' means of losses that are the labels. ``weights``: with weights."""
    if weights:
        sums = [(b.labels * b.label_weights)[b.labels >= 0].sum() for b in batches]
        return sum(sums) / sum(batch.counted_tokens for batch in batches)
    means = []
    for batch in batches:
        documents = batch.document_ids
        for row, labels in enumerate(batch.labels):
            kept = np.zeros(len(labels)) if documents is None else documents[row]
            parts = [labels[(kept == number) & (labels >= 0)] for number in np.unique(kept)]
            means += [part.mean() for part in parts if len(part)]
    return sum(means) / len(means)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_weights_give_samples_the_same_share(tmp_path, micro_batch) -> None:
    """Documents of one token have no label, and count no sample."""
    tokens = [
        1,
        2,
        EOS,
        EOS,
        3,
        4,
        5,
        6,
        7,
        8,
        1,
        EOS,
        2,
        3,
        3,
        EOS,
        EOS,
        EOS,
        EOS,
        EOS,
        1,
        2,
        3,
        4,
    ]
    np.array([*tokens, 5], dtype="<u2").tofile(tmp_path / "t.bin")
    data = dataset(tmp_path / "t.bin", 6, shuffle=False, objective=NextToken(ends=(EOS,)))
    batches, counted = micro_batches(data, 0, 4, micro_batch, by_sample=True)
    plain, same = micro_batches(data, 0, 4, micro_batch)
    assert counted == same and plain[0].label_weights is None
    assert all(b.label_weights.dtype == np.float32 for b in batches)
    expected = means_of_samples(plain, weights=False)
    assert means_of_samples(batches, weights=True) == pytest.approx(expected, rel=1e-6)
    assert sum(b.label_weights.sum() for b in batches) == pytest.approx(counted, rel=1e-6)


def test_samples_of_labels_without_places() -> None:
    """One label a row, and document numbers that no row has together."""
    ids = np.ones((2, 3), dtype=np.int64)
    documents = np.array([[7, 7, 10**12], [10**12, 5, 5]])
    single = MicroBatch(input_ids=ids, labels=ids[:, :1], document_ids=documents)
    assert single.samples.tolist() == [[0], [1]]
    odd = MicroBatch(input_ids=ids, labels=ids, document_ids=documents).samples
    assert odd.tolist() == [[0, 0, 1], [3, 2, 2]]
    (empty,) = weighted_by_sample([replace(single, labels=np.full((2, 1), -100))])
    assert empty.label_weights.tolist() == [[0.0], [0.0]]


MASKS = Masked(mask=2001, vocab_size=2002, fraction=0.15, seed=3)


def masked(path: Path, position: int, count: int, micro_batch: int) -> np.ndarray:
    """Inputs and labels of some samples, (2, count, 100)."""
    data = dataset(path, 100, shuffle=False, objective=MASKS)
    batches, counted = micro_batches(data, position, count, micro_batch)
    assert counted == 15 * count
    parts = [np.stack([batch.input_ids, batch.labels]) for batch in batches]
    return np.concatenate(parts, axis=1)


def test_masked_tokens_are_to_be_predicted(token_file) -> None:
    inputs, labels = masked(token_file, 0, 20, 4)
    tokens = np.arange(2000).reshape(20, 100)
    chosen = labels != -100
    assert (labels[chosen] == tokens[chosen]).all() and (inputs[~chosen] == tokens[~chosen]).all()
    masks, kept = (inputs[chosen] == 2001).mean(), (inputs[chosen] == tokens[chosen]).mean()
    assert 0.74 < masks < 0.86 and 0.05 < kept < 0.15
    assert (chosen.sum(axis=1) == 15).all() and inputs.max() <= 2001 and inputs.min() >= 0


def test_a_short_sequence_has_a_masked_token(token_file) -> None:
    """15 % of three tokens round to none, and a row without labels would train nothing."""
    data = dataset(token_file, 3, shuffle=False, objective=MASKS)
    (batch,), counted = micro_batches(data, 0, 20, 20)
    assert ((batch.labels != -100).sum(axis=1) == 1).all() and counted == 20


def test_masks_follow_from_the_sample_alone(token_file) -> None:
    """Whoever asks, in whatever micro-batches; each pass has masks of its own."""
    whole = masked(token_file, 0, 20, 20)
    assert (whole == masked(token_file, 0, 20, 1)).all()
    assert (whole[:, 7:9] == masked(token_file, 7, 2, 2)).all()
    assert (whole != masked(token_file, 20, 20, 20)).any(), "the same sequences, a pass later"
    assert np.flatnonzero(whole[1, 0] != -100).tolist() == GOLDEN_MASKS


def test_an_objective_of_ones_own(token_file) -> None:
    own = Own(halves)
    (batch,), counted = micro_batches(dataset(token_file, 4, shuffle=False, objective=own), 0, 1, 1)
    assert batch.input_ids.tolist() == [[0, 1]] and counted == 2
    with pytest.raises(ConfigError, match=r"data.objective = 'no.such:thing': cannot import it"):
        own_objective(with_objective("no.such:thing"))
    assert isinstance(own_objective(with_objective("json:loads")), Own)
    assert own_objective(with_objective("masked")) is None


def with_objective(name: str) -> Config:
    """A configuration with an objective."""
    return parse_config({"model": {"path": "m"}, "data": {"tokens": "t", "objective": name}})


def halves(tokens: np.ndarray) -> MicroBatch:
    """The second half of a sequence is predicted from the first."""
    return MicroBatch(input_ids=tokens[:, :2], labels=tokens[:, 2:4])


def test_part_of_a_file(token_file) -> None:
    data = dataset(token_file, 10, shuffle=False, first_token=100, num_tokens=31)
    assert data.num_sequences == 3
    assert data.batch(2, 1).tolist() == [list(range(120, 131))]


def test_bad_files_are_named(tmp_path, token_file) -> None:
    with pytest.raises(StateError, match=r"none.bin: cannot map it"):
        dataset(tmp_path / "none.bin")
    (tmp_path / "empty.bin").touch()
    with pytest.raises(StateError, match=r"empty.bin: cannot map it"):
        dataset(tmp_path / "empty.bin")
    with pytest.raises(StateError, match=r"has 2001 tokens, expected at least 3000"):
        dataset(token_file, num_tokens=3000)
    with pytest.raises(ConfigError, match=r"data.sequence_length = 2001: .* has 2001 tokens"):
        dataset(token_file, 2001)
