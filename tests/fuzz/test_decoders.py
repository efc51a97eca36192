"""Whatever bytes come, decoders end in a value or an error of ours: kept and changed inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuzz.census import readers
from tests.fuzz.corpus import CORPUS, MAX_BYTES, kept
from tests.fuzz.mutating import Mutator
from tests.fuzz.table import EXCUSED, TARGETS
from tests.fuzz.target import Target, attempt, bounded_memory, watched


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Damage is warned of, thousands of times here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_decoder_is_in_the_table() -> None:
    covered = {name for target in TARGETS.values() for name in target.covers}
    found = readers()
    missing = found - covered - EXCUSED.keys()
    assert not missing, f"give them a target in tests/fuzz/targets, or say why not: {missing}"
    assert not EXCUSED.keys() - found, "these are no readers any more"
    assert not EXCUSED.keys() & covered, "these have a target"


def test_the_corpus_is_small_and_of_targets() -> None:
    files = list(CORPUS.glob("*"))
    assert {path.stem for path in files} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_decoder(target: Target, tmp_path: Path) -> None:
    """Inputs as Penstock writes them reach all that the target covers; none breaks anything."""
    seeds, entered = list(target.seeds()), set[str]()
    inputs = [*seeds, *kept(target.name)]
    changes = Mutator(target.form, inputs)
    with target.open(tmp_path) as decode:
        with watched(entered), suppress(*target.allowed):
            decode(seeds[0])  # which may import a library
        with bounded_memory(target.name):
            with watched(entered):
                for data in seeds:
                    attempt(target, decode, data)
            for data in inputs[len(seeds) :]:
                attempt(target, decode, data)
            for number in range(target.examples):
                attempt(target, decode, changes.example(target.name, number))
    assert not set(target.covers) - entered
