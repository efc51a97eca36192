"""Tokenizers of all usual kinds, trained on a small text, and texts that are hard to cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\p{L}+|\s+|[^\s\p{L}\p{N}]+"
"""Groups digits from the right, so a group's place depends on the end of the number."""

WORDS = (
    "the water of a mill runs down hill hills milling 1234567 42 3.14159 don't we'll it's"
    " Straße \uff21\uff22\uff23 ﬁne e\u0301te\u0301 été ½ 你好 世界 。 \uff0c 再见 朋友 привет мир"
    " नमस्ते 한국어 각 🙂🙂 🇩🇪🇫🇷 👩\u200d👩\u200d👧"
    " ... --- === __init__ ()[]{}; <|end|> <mask> “quoted” a\u0308\u0323"
).split()
SPACES = (" ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "")


def corpus() -> list[str]:
    draw = random.Random(7)
    return ["".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(60)) for _ in range(80)]


def _bpe(**options: object) -> Tokenizer:
    return Tokenizer(models.BPE(**options))


def _trained(tokenizer: Tokenizer, trainer: object) -> Tokenizer:
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return tokenizer


def _bytes(normalizer: object = None, pattern: str | None = None, **options: object) -> Tokenizer:
    tokenizer = _bpe()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    if pattern is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    return _trained(tokenizer, trainer)


def _spaces_as_signs(*, split: bool, scheme: str = "first") -> Tokenizer:
    """As Llama 2, or Gemma: byte pair encoding of the whole text, with signs in place of spaces."""
    tokenizer = _bpe(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    tokenizer.decoder = decoders.Metaspace()
    bytes_ = ["<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=bytes_, max_token_length=12,
        limit_alphabet=60,
    )  # fmt: skip
    return _trained(tokenizer, trainer)


def _unigram(*, precompiled: bool = False, split: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    parts = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(parts) if precompiled else normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    return _trained(tokenizer, trainer)


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, show_progress=False, special_tokens=["[UNK]"]
    )
    return _trained(tokenizer, trainer)


def _suffixed() -> Tokenizer:
    """As the first GPT: words end in a sign."""
    tokenizer = _bpe(unk_token="<unk>", end_of_word_suffix="</w>")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>"], end_of_word_suffix="</w>"
    )
    return _trained(tokenizer, trainer)


PIPELINES: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: _bytes(),
    "roberta": lambda: _bytes(trim_offsets=True),
    "llama3": lambda: _bytes(pattern=LLAMA3),
    "qwen": lambda: _bytes(normalizers.NFC(), LLAMA3),
    "o200k": lambda: _bytes(pattern=O200K),
    "from-right": lambda: _bytes(pattern=FROM_RIGHT),
    "quotes": lambda: _bytes(pattern=r'"[^"]*"|\w+|[^\w\s]+|\s+'),
    "lower": lambda: _bytes(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "llama2": lambda: _spaces_as_signs(split=False),
    "metaspace-bpe": lambda: _spaces_as_signs(split=True),
    "metaspace-always": lambda: _spaces_as_signs(split=True, scheme="always"),
    "unigram": lambda: _unigram(),
    "t5": lambda: _unigram(precompiled=True),
    "unigram-whole": lambda: _unigram(split=False),
    "wordpiece": _wordpiece,
    "gpt": _suffixed,
}


@cache
def pipeline(name: str) -> Tokenizer:
    """Returns one of ``PIPELINES``, made once."""
    return PIPELINES[name]()


def _mixed(draw: random.Random, size: int) -> str:
    text = ""
    while len(text) < size:
        text += draw.choice(WORDS) + draw.choice(SPACES)
    return text


def _stretches(draw: random.Random, size: int) -> str:
    """Text between runs of one kind that are longer than overlaps."""
    text = ""
    runs = (
        " ",
        "\n",
        "a",
        "7",
        "1234567890",
        "-",
        "🙂",
        "🇩🇪",
        "\u0301",
        "ab",
        "你",
        "\t ",
        "<mask>",
    )
    while len(text) < size:
        text += _mixed(draw, draw.randrange(600))
        text += draw.choice(runs) * draw.randrange(1, draw.choice((4, 40, 2500)))
    return text


def _signs(draw: random.Random, size: int) -> str:
    """Random characters of a few kinds."""
    signs = draw.choice(("ab ", "aA1 .\n", "ab", "12 ,", " \n\t", "é́ ̈a", "你好。", "▁a ", '"a b'))
    return "".join(draw.choice(signs) for _ in range(size))


def _prose(draw: random.Random, size: int) -> str:
    """Words with single spaces, and no end of a line."""
    return " ".join(draw.choice(WORDS[:10]) for _ in range(size // 4))


HARD_TEXTS: Mapping[str, Callable[[random.Random, int], str]] = {
    "mixed": _mixed,
    "stretches": _stretches,
    "signs": _signs,
    "prose": _prose,
}
