"""Long texts in pieces: the ids of one call, for tokenizers of all kinds and texts hard to cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from tokenizers import NormalizedString, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.host.errors import ConfigError
from penstock.host.limits.cgroup import tightest_memory
from penstock.models.data.pieces.encoding import Sizes, check_length, encode_documents
from penstock.models.data.pieces.locality import locality_of
from penstock.models.data.pieces.patterns import CannotTell, reach_of
from penstock.models.data.reading.records import Document
from penstock.models.data.tokenizer_folder import FolderTokenizer
from tests.models.pipelines import HARD_TEXTS, LLAMA3, PIPELINES, pipeline

SMALL = Sizes(batch=5000, piece=100, overlap=200)


class Calls:
    """The lengths of what one call of the library encodes."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, characters: int) -> AbstractContextManager[None]:
        self.lengths.append(characters)
        return nullcontext()


def document(text: str, part: int = 1 << 20) -> Document:
    """A document whose parts have so many characters."""
    parts = (text[start : start + part] for start in range(0, len(text), part))
    return Document(place="a text", parts=parts)


def in_pieces(tokenizer: Tokenizer, text: str, sizes: Sizes, calls: Calls) -> list[int]:
    parts = list(encode_documents([document(text, 777)], tokenizer, calls, sizes))
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    return np.concatenate([part.ids for part in parts]).tolist()


def check(name: str, kind: str, seeds: range) -> None:
    tokenizer = pipeline(name)
    for seed in seeds:
        draw = random.Random(f"{name}/{kind}/{seed}")
        text = HARD_TEXTS[kind](draw, draw.randrange(3000, 12_000))
        sizes = Sizes(
            batch=draw.choice((1, 5000)),
            piece=draw.randrange(100, 900),
            overlap=draw.choice((200, 600, 1200)),
        )
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert in_pieces(tokenizer, text, sizes, Calls()) == whole, f"{name}, {kind}, seed {seed}"


@pytest.mark.parametrize("kind", HARD_TEXTS)
@pytest.mark.parametrize("name", PIPELINES)
def test_pieces_give_the_ids_of_one_call(name: str, kind: str) -> None:
    check(name, kind, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HARD_TEXTS)
@pytest.mark.parametrize("name", PIPELINES)
def test_pieces_give_the_ids_of_one_call_for_many_texts(name: str, kind: str) -> None:
    check(name, kind, range(3, 60))


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2", "t5", "wordpiece"])
@pytest.mark.parametrize("kind", ["mixed", "prose"])
def test_usual_texts_are_cut(name: str, kind: str) -> None:
    """No call encodes much more than a batch."""
    text = HARD_TEXTS[kind](random.Random(1), 60_000)
    calls = Calls()
    tokenizer = pipeline(name)
    ids = in_pieces(tokenizer, text, SMALL, calls)
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert max(calls.lengths) <= SMALL.batch + 100 and len(calls.lengths) > 10


@pytest.mark.parametrize("run", [" ", "a", "7", "你", "\u0301", "🇩🇪"])
def test_a_run_without_places_to_cut_is_encoded_as_a_whole(run: str) -> None:
    tokenizer, calls = pipeline("llama3"), Calls()
    prose = HARD_TEXTS["prose"](random.Random(2), 20_000)
    text = f"{prose}{run * 9000}{prose}"
    assert in_pieces(tokenizer, text, SMALL, calls) == tokenizer.encode(text).ids
    assert 9000 <= max(calls.lengths) < len(text)


def test_one_repeated_letter_is_cut_inside_of_the_word() -> None:
    """Byte pair encoding without a split of words; tokens of several letters have no phase."""
    tokenizer, calls = pipeline("llama2"), Calls()
    text = "hills" * 4000
    assert in_pieces(tokenizer, text, SMALL, calls) == tokenizer.encode(text).ids
    assert max(calls.lengths) < 6000


def test_documents_stay_apart_in_a_batch() -> None:
    tokenizer = pipeline("gpt2")
    texts = [HARD_TEXTS["mixed"](random.Random(n), draw) for n, draw in enumerate((9, 4000, 30))]
    ids, ended = [], []
    for part in encode_documents([document(text) for text in texts], tokenizer, sizes=SMALL):
        ids += part.ids.tolist()
        if part.ends:
            ended.append(ids)
            ids = []
    assert ended == [tokenizer.encode(text).ids for text in texts] and ids == []


class Reversed:
    """A normalizer in Python, of which nothing is known."""

    def normalize(self, normalized: NormalizedString) -> None:
        normalized.map(lambda sign: sign)


def unknown() -> Iterator[Tokenizer]:
    """Tokenizers that may look at the whole text, and one whose tokens are drawn."""
    for kind in ("python", "fixed", "dropout", "back", "letters"):
        tokenizer = Tokenizer(models.BPE(dropout=0.1 if kind == "dropout" else None))
        if kind == "python":
            tokenizer.normalizer = normalizers.Normalizer.custom(Reversed())
        if kind == "fixed":
            tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(5)
        if kind == "letters":
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.ByteLevel(), pre_tokenizers.ByteLevel()]
            )
        yield tokenizer


def test_tokenizers_of_unknown_reach_are_not_cut() -> None:
    reaches = [locality_of(tokenizer) for tokenizer in unknown()]
    assert reaches[:3] == [None, None, None] and reaches[4] is None
    assert reaches[3] is not None, "no pattern at all"
    (tokenizer, *_), calls = list(unknown()), Calls()
    list(encode_documents([document("a" * 9000)], tokenizer, calls, SMALL))
    assert calls.lengths == [9000]


@pytest.mark.parametrize(
    ("pattern", "atoms", "repeated"),
    [
        (r"\p{N}{1,3}", 1, [(r"\p{N}",)]),
        (r"(?i:'s|'t)|[^\r\n[a]\]]?\p{L}+", 6, [(r"\p{L}",)]),
        (r"(?:ab){2,}|c{,3}|d{1}|e?|f*?", 6, [("a", "b"), ("c",), ("f",)]),
        (r"\s+(?!\S)|^a$|[]x]+", 6, [(r"\s",), ("[]x]",)]),
        (r"(?<n>a)+\x{200d}\u00e9\-", 4, [("a",)]),
    ],
)
def test_the_reach_of_patterns(pattern: str, atoms: int, repeated: list) -> None:
    reach = reach_of(pattern)
    assert (reach.atoms, list(reach.repeated)) == (atoms, repeated)


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", r"(?x) a", r"\K", r"\X", r"(?~a)", r"(", r"a)", r"[a", r"*a", "\\", r"\R"]
)
def test_patterns_that_are_not_known(pattern: str) -> None:
    with pytest.raises(CannotTell):
        reach_of(pattern)


def test_usual_patterns_are_known() -> None:
    assert {name for name in PIPELINES if locality_of(pipeline(name)) is None} == set()
    assert reach_of(LLAMA3).atoms == 28


def test_what_memory_is_too_small_for_is_refused() -> None:
    check_length(document(""), 1000)
    with pytest.raises(ConfigError, match=r"a text: the tokenizer has to encode .* in one call"):
        check_length(document(""), tightest_memory().limit)


@pytest.mark.parametrize("name", ["llama2", "llama3", "t5"])
def test_a_folders_tokenizer_gives_transformers_own_ids(name: str, tmp_path: Path) -> None:
    """A text of several pieces of the usual size, in one call of transformers."""
    backend = pipeline(name)
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    saved.save_pretrained(tmp_path)
    text = HARD_TEXTS["mixed"](random.Random(3), 400_000)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = FolderTokenizer(tmp_path, key="data.tokenizer", known_ends=())
    parts = list(ours.encode_documents([document(text)]))
    assert len(parts) > 2
    ids = np.concatenate([part.ids for part in parts]).tolist()
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
