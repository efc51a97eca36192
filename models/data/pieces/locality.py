"""The reach of a tokenizer around a place in a text. Beyond it, texts may be cut without other
tokens.

The library ``tokenizers`` normalizes a text, splits it into words, and encodes each word alone.
Normalizers and most splits read neighbouring characters. A split by a regular expression is a scan:
the words after a match depend only on the text behind it.

An atom of the pattern matches one character, or with a repetition a run of characters that the atom
matches. Two neighbours that no repetition covers together are a break. So a match, with all text
that it reads, has at most as many breaks as its pattern has atoms.

:class:`Locality` counts breaks. Other tokenizers (:func:`locality_of` returns None) may read the
whole text.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from penstock.models.data.pieces.patterns import CannotTell, reach_of

_MARGIN = 16
"""Breaks or characters that neighbours, composed characters and clusters of them take at most."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of ``ByteLevel``."""

_BY_NEIGHBOURS = frozenset(
    "BertPreTokenizer Whitespace WhitespaceSplit Punctuation Digits CharDelimiterSplit Metaspace"
    " UnicodeScripts".split()
)
_BY_CHARACTER = frozenset(
    "Lowercase StripAccents Nmt BertNormalizer NFC NFD NFKC NFKD Precompiled Prepend Strip".split()
)
_MODELS = (models.BPE, models.Unigram, models.WordPiece, models.WordLevel)
_MOST_REPETITIONS = 63
_UNKNOWN = np.uint64(1 << 63)
_MAX_CODE = 0x110000


class Locality:
    """The reach of a tokenizer. A place is settled where :meth:`count` grows by ``reach`` or more
    on both sides. ``inside_words``: a place inside of a word may be settled, too (byte pair
    encoding).
    """

    def __init__(
        self, reach: int, repetitions: list[pre_tokenizers.Split], *, inside_words: bool
    ) -> None:
        self.reach, self.inside_words = reach, inside_words
        self._repetitions = repetitions
        self._signs = np.full(_MAX_CODE, _UNKNOWN, dtype=np.uint64)

    def count(self, text: str) -> NDArray[np.int64]:
        """Returns for each character of ``text`` the number of breaks before it in the text.
        Without expressions, the number of letters, digits and ASCII signs.
        """
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        signs = self._signs[codes]
        if (signs == _UNKNOWN).any():
            for code in np.unique(codes[signs == _UNKNOWN]).tolist():
                self._signs[code] = self._sign(chr(code))
            signs = self._signs[codes]
        steps = np.zeros(len(codes), dtype=np.int64)
        if self._repetitions:
            steps[1:] = (signs[1:] & signs[:-1]) == 0
        else:
            steps[1:] = signs[:-1] != 0
        return np.cumsum(steps)

    def _sign(self, character: str) -> int:
        """Returns a bit for each repetition that covers a character; without any, 1 for a
        character that stands for itself.
        """
        if self._repetitions:
            bits = (
                1 << place
                for place, split in enumerate(self._repetitions)
                if not split.pre_tokenize_str(character)
            )
            return sum(bits)
        plain = unicodedata.category(character)[0] in "LN"
        return int(plain or (character.isascii() and character.isprintable() and character != " "))


def locality_of(tokenizer: Tokenizer) -> Locality | None:
    """Returns the reach of a tokenizer; None if it may read the whole text, or is random."""
    model = tokenizer.model
    if not isinstance(model, _MODELS) or getattr(model, "dropout", None):
        return None
    parts = _Parts()
    try:
        parts.add_normalizer(_state(tokenizer.normalizer))
        parts.add_split(_state(tokenizer.pre_tokenizer))
    except (CannotTell, ValueError, KeyError, TypeError):
        return None
    if len(parts.repetitions) > _MOST_REPETITIONS:
        return None
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    longest = max((len(content) for content in contents), default=0)
    reach = parts.reach + longest + _MARGIN
    return Locality(reach, parts.repetitions, inside_words=isinstance(model, models.BPE))


def _state(part: Any) -> Any:
    """Returns a normalizer or pre-tokenizer as ``tokenizer.json`` has it.

    Raises:
        ValueError: it is code of the user's.
    """
    if part is None:
        return None
    try:
        return json.loads(part.__getstate__())
    except Exception as error:  # the library raises nothing narrower
        raise ValueError("a part in Python") from error


@dataclass(slots=True)
class _Parts:
    """The sum of the parts of a pipeline."""

    reach: int = 0
    repetitions: list[pre_tokenizers.Split] = field(default_factory=list)
    other_letters: bool = False

    def add_normalizer(self, part: Any) -> None:
        """Adds a normalizer.

        Raises:
            CannotTell: the normalizer may read the whole text.
        """
        kind = None if part is None else part["type"]
        if kind == "Sequence":
            for inner in part["normalizers"]:
                self.add_normalizer(inner)
        elif kind == "Replace":
            self._add_pattern(part["pattern"])
        elif kind == "ByteLevel":
            self.other_letters = True
        elif kind is not None and kind not in _BY_CHARACTER:
            raise CannotTell(kind)

    def add_split(self, part: Any) -> None:
        """Adds a pre-tokenizer.

        Raises:
            CannotTell: the pre-tokenizer may read the whole text.
        """
        kind = None if part is None else part["type"]
        if kind == "Sequence":
            for inner in part["pretokenizers"]:
                self.add_split(inner)
        elif kind == "Split":
            self._add_pattern(part["pattern"])
        elif kind == "ByteLevel":
            if part.get("use_regex", True):
                self._add_pattern({"Regex": _GPT2})
            self.other_letters = True
        elif kind == "Metaspace":
            self.other_letters = True
        elif kind is not None and kind not in _BY_NEIGHBOURS:
            raise CannotTell(kind)

    def _add_pattern(self, pattern: dict[str, str]) -> None:
        if "String" in pattern:
            self.reach += len(pattern["String"])
            return
        if self.other_letters:
            raise CannotTell("an expression over letters that stand for others")
        reach = reach_of(pattern["Regex"])
        self.reach += reach.atoms
        for atoms in reach.repeated:
            # Case is ignored: the atom may be in a group that ignores case.
            covering = Regex(f"(?i:{'|'.join(atoms)})")
            self.repetitions.append(pre_tokenizers.Split(covering, behavior="removed"))
        if not reach.repeated:  # its matches are short, and still counted in breaks
            nothing = Regex(r"(?!)")
            self.repetitions.append(pre_tokenizers.Split(nothing, behavior="removed"))
