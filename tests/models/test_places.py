"""Places of tokens from their widths are those of the library."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from penstock.models.data.chat.encoder import Encoder, Passage
from penstock.models.data.chat.places import Widths
from penstock.models.data.tokenizer import ByteTokenizer
from tests.models.test_chat_labels import DATA

TEXTS = ["the pumps lift the water", "é 水 🙂 don't", "a  b\n\n c 1234"]


def trained(**parts: object) -> Tokenizer:
    """A small byte-level BPE with other parts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return tokenizer


LIBRARIES = {
    "chat": (Tokenizer.from_file(str(DATA / "tokenizer.json")), False),
    "composing": (trained(normalizer=normalizers.NFC()), False),
    "bytes": (ByteTokenizer().chat_parts().library, True),
}
ENCODERS = {name: Encoder(made, is_bytes=plain) for name, (made, plain) in LIBRARIES.items()}


@pytest.mark.parametrize("name", list(LIBRARIES))
@settings(max_examples=150, deadline=None)
@given(
    st.text(st.characters(codec="utf-8") | st.sampled_from("a é\n水🙂e\u0301"), max_size=40),
    st.integers(0, 40),
    st.integers(0, 40),
)
@example("e\u0301 a", 0, 2)
@example("<|endoftext|> a", 3, 14)
def test_tokens_of_characters_are_those_of_the_library(
    name: str, text: str, first: int, last: int
) -> None:
    made = LIBRARIES[name][0].encode(text, add_special_tokens=False)
    (encoding,) = ENCODERS[name].encode([Passage(place="here", text=text)])
    assert encoding.ids == made.ids
    assert [encoding.span(n) for n in range(len(made.ids))] == made.offsets
    first, last = min(first, last), max(first, last, min(first, last) + 1)
    begin, end = encoding.tokens(first, last)
    overlapping = [n for n, (a, b) in enumerate(made.offsets) if b > first and a < last]
    assert list(range(begin, max(begin, end))) == overlapping
    (alone,) = ENCODERS[name].encode([Passage(place="here", text=text)], [False])
    assert alone.ids == made.ids


def test_widths_are_taken_of_byte_level_tokenizers_alone() -> None:
    assert all(Widths.of(library) is not None for library, _ in LIBRARIES.values())
    trimming = processors.ByteLevel(trim_offsets=True)
    prefix = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for part in (
        {"post_processor": trimming},
        {"pre_tokenizer": prefix},
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
    ):
        assert Widths.of(trained(**part)) is None, part
    assert Widths.of(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
