"""Any cut of a run, and any division of its work, leaves the order of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from penstock.config.schema import Config
from penstock.models.data.batch import MicroBatch
from penstock.workers.data import micro_batches, open_dataset
from tests.models.test_rows import chat, made, opened, written

CUTS = 1000
BATCH = 12
MICRO_BATCHES = (1, 2, 3, 4, 6, 12)
WORKERS = (1, 2, 3)


@pytest.fixture(scope="module", name="prepared")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A run of packed rows: conversations of many lengths, some drawn twice."""
    folder, random = tmp_path_factory.mktemp("cuts"), Random(35)
    records = [chat(f"question {n}", "x" * random.randint(1, 60)) for n in range(150)]
    source = {"path": str(written(folder, records)), "weight": 1.5}
    data = {"sources": [source], "sequence_length": 256, "packing": "best-fit"}
    config = made(folder, data, train={"global_batch": BATCH})
    layout = opened(folder)[0].layout
    assert layout.samples > 2 * layout.rows > 60 and layout.rows % BATCH
    return folder, config


def rows_of(batch: MicroBatch) -> Iterator[bytes]:
    """Ids, labels, positions and documents of each row, of which the last two may be implied."""
    shape = batch.input_ids.shape
    positions, documents = batch.position_ids, batch.document_ids
    if positions is None or documents is None:
        positions, documents = np.broadcast_to(np.arange(shape[1]), shape), np.zeros(shape, int)
    for arrays in zip(batch.input_ids, batch.labels, positions, documents, strict=True):
        yield np.stack(arrays).tobytes()


def test_a_thousand_cuts_leave_the_order_of_samples(prepared: tuple[Path, Config]) -> None:
    folder, config = prepared
    random, position = Random(7), 0
    trained: list[bytes] = []
    for _ in range(CUTS + 1):
        # Every start opens the files again, in each worker.
        workers, size = random.choice(WORKERS), random.choice(MICRO_BATCHES)
        datasets = [open_dataset(folder / "data", "train", config) for _ in range(workers)]
        for _ in range(random.randint(1, 2)):
            seen = [micro_batches(each, position, BATCH, size) for each in datasets]
            assert len({counted for _, counted in seen}) == 1
            for number in range(BATCH // size):
                batches, _ = seen[number % workers]
                trained += rows_of(batches[number])
            position += BATCH
    whole = open_dataset(folder / "data", "train", config)
    expected = [row for batch in whole.read(0, position, 1) for row in rows_of(batch)]
    assert trained == expected
    rows = whole.num_sequences
    passes = [expected[start : start + rows] for start in range(0, position - rows, rows)]
    assert len(passes) > 100
    assert all(sorted(each) == sorted(passes[0]) for each in passes)
    assert passes[0] != passes[1] and len(set(expected)) <= rows
