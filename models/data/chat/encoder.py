"""Texts as token ids with the place of each token, as ``apply_chat_template`` of transformers
encodes a rendering. No torch.

A rendering is encoded in one piece without added special tokens; the template prints its own. So
ids equal those of transformers and TRL. A message may hold the text of a special token.
Then the rendering is cut around this text, which is encoded as ordinary text. transformers gives
the same ids with ``sanitize_control_tokens``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HubTokenizer

from penstock.host.errors import ConfigError
from penstock.models.data.chat.places import Places, Widths

Span = tuple[int, int]
"""First character of a part of a text, and the one behind its last."""

_PROBES = ("a", "0", "text", "\u4e00")
"""Short texts; every usual tokenizer has a token for one of them."""

_BREAK = "\n"
"""Text in front of a later piece, so that no tokenizer adds the space of a text's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Ids of a text. ``span`` returns the span of characters of a token by its number; firsts and
    lasts never decrease. ``places`` are the same as arrays, where they are known.
    """

    ids: list[int]
    span: Callable[[int], Span]
    places: Places | None = None

    def tokens(self, first: int, last: int) -> Span:
        """Returns the span of tokens that overlap the characters ``first`` to ``last - 1``."""
        if self.places is not None:
            return (
                int(np.searchsorted(self.places.ends, first, side="right")),
                int(np.searchsorted(self.places.firsts, last)),
            )
        numbers = range(len(self.ids))
        return (
            bisect_right(numbers, first, key=lambda number: self.span(number)[1]),
            bisect_left(numbers, last, key=lambda number: self.span(number)[0]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text of the record ``place``.

    ``literal`` are spans with the text of special tokens that are ordinary text, in order.
    ``special`` requests the special tokens that the tokenizer adds to a text, unless the text has
    them; ``goes_on`` leaves out those behind the text.
    """

    place: str
    text: str
    literal: tuple[Span, ...] = ()
    special: bool = False
    goes_on: bool = False


SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
"""Names of special tokens that a chat template may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParts:
    """The parts of a tokenizer that conversations need.

    ``special`` are texts of special tokens by name, such as ``eos_token``. ``end`` is the text of
    the token that ends a document, which the model's ``config.json`` may name. ``template`` is the
    chat template, or several by name. Both are None where there is none. ``is_bytes`` is True if
    the ids of a text without special tokens are its bytes.
    """

    library: HubTokenizer
    special: Mapping[str, str]
    end: str | None = None
    template: str | Mapping[str, str] | None = None
    is_bytes: bool = False


class Encoder:
    """A tokenizer of the library ``tokenizers``, as transformers calls it.

    ``special_tokens`` are the texts of its special tokens. All calls share the library's object, so
    one thread at a time may use it.
    """

    def __init__(self, tokenizer: HubTokenizer, *, is_bytes: bool = False) -> None:
        self._tokenizer, self._is_bytes = tokenizer, is_bytes
        self._widths = Widths.of(tokenizer)
        tokens = tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in tokens if token.special)
        self._break_ids: list[int] = tokenizer.encode(_BREAK, add_special_tokens=False).ids
        self._front, self._back = added_ids(
            lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids
        )

    def encode(
        self, passages: Sequence[Passage], placed: Sequence[bool] | None = None
    ) -> list[Encoding]:
        """Returns the encodings of passages. Whole passages take few calls of the library for all
        cores. ``placed`` marks the passages that need places of tokens; None stands for all.

        Raises:
            ConfigError: a text has half of a surrogate pair, or its tokenizer makes a special token
                of ordinary text.
        """
        for passage in passages:
            _check_characters(passage)
        kinds: dict[tuple[bool, bool], list[int]] = {}
        encodings: dict[int, Encoding] = {}
        for number, passage in enumerate(passages):
            if passage.literal:
                encodings[number] = self._in_pieces(passage)
            elif self._is_plain(passage):
                encodings[number] = _bytes(passage.text)
            else:
                needs = placed is None or placed[number]
                kinds.setdefault((passage.special, needs), []).append(number)
        for (special, needs), numbers in kinds.items():
            texts = [passages[number].text for number in numbers]
            made = self._batch(texts, special=special, places=needs)
            for number, encoding in zip(numbers, made, strict=True):
                once = self._once(encoding, passages[number].goes_on) if special else encoding
                encodings[number] = once
        return [encodings[number] for number in range(len(passages))]

    def _batch(self, texts: list[str], *, special: bool, places: bool) -> Iterator[Encoding]:
        """Yields the encodings of texts, without ``places`` of tokens where none are needed."""
        if places and (special or self._widths is None):
            batch = self._tokenizer.encode_batch(texts, add_special_tokens=special)
            yield from map(_encoding, batch)
            return
        batch = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        for text, made in zip(texts, batch, strict=True):
            ids = made.ids
            if not places or self._widths is None:
                yield Encoding(ids=ids, span=_unknown)
            elif (known := self._widths.places(text, ids)) is not None:
                yield _placed(ids, known)
            else:
                yield _encoding(self._tokenizer.encode(text, add_special_tokens=False))

    def _once(self, encoding: Encoding, goes_on: bool) -> Encoding:
        """Returns the encoding without added tokens that its text has, too."""
        ids = encoding.ids
        front, back = len(self._front), len(self._back)
        first = front if ids[front : 2 * front] == self._front else 0
        last = len(ids) - back
        if not back or not (goes_on or ids[max(first, last - back) : last] == self._back):
            last = len(ids)
        if last - first == len(ids):
            return encoding
        return Encoding(ids=ids[first:last], span=lambda number: encoding.span(first + number))

    def _is_plain(self, passage: Passage) -> bool:
        """Returns whether the ids of a passage are the bytes of its text, one for each character.
        The library takes 40 times as long for them.
        """
        text = passage.text
        if not (self._is_bytes and text.isascii()) or passage.literal:
            return False
        return not any(token in text for token in self.special_tokens)

    def _in_pieces(self, passage: Passage) -> Encoding:
        """Returns the encoding of a passage that is cut around its literal spans."""
        ids: list[int] = []
        spans: list[Span] = []
        for (start, stop), literal in _pieces(passage):
            text = passage.text[start:stop]
            piece = self._piece(text, literal=literal, later=start > 0)
            if literal and self._tokenizer.token_to_id(text) in piece.ids:
                raise ConfigError(
                    f"{passage.place}: a message holds {text!r}, and the tokenizer makes a special"
                    " token of the text in any case; remove the text from the message"
                )
            ids += piece.ids
            tokens = map(piece.span, range(len(piece.ids)))
            spans += [(start + first, start + last) for first, last in tokens]
        return Encoding(ids=ids, span=spans.__getitem__)

    def _piece(self, text: str, *, literal: bool, later: bool) -> Encoding:
        """Returns the encoding of a piece, as a part of a longer text where it is a ``later``
        one.
        """
        if not later:
            return self._encode(text, literal)
        made = self._encode(_BREAK + text, literal)
        count = len(self._break_ids)
        if made.ids[:count] != self._break_ids:
            return self._encode(text, literal)
        tokens = map(made.span, range(count, len(made.ids)))
        spans = [(max(0, first - 1), max(0, last - 1)) for first, last in tokens]
        return Encoding(ids=made.ids[count:], span=spans.__getitem__)

    def _encode(self, text: str, literal: bool) -> Encoding:
        before = self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = literal
        try:
            return _encoding(self._tokenizer.encode(text, add_special_tokens=False))
        finally:
            self._tokenizer.encode_special_tokens = before


def added_ids(encode: Callable[[str, bool], Sequence[int]]) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer puts in front of any text and behind it when it adds special
    tokens.

    ``encode`` returns the ids of a text, with special tokens where its second argument is True.
    """
    for text in _PROBES:
        plain, whole = list(encode(text, False)), list(encode(text, True))
        if plain:
            starts = range(len(whole) - len(plain) + 1)
            start = next((n for n in starts if whole[n : n + len(plain)] == plain), None)
            return ([], []) if start is None else (whole[:start], whole[start + len(plain) :])
    return [], []


def _bytes(text: str) -> Encoding:
    numbers = np.arange(len(text) + 1)
    return _placed(list(text.encode()), Places(numbers[:-1], numbers[1:]))


def _placed(ids: list[int], places: Places) -> Encoding:
    def span(number: int) -> Span:
        return int(places.firsts[number]), int(places.ends[number])

    return Encoding(ids=ids, span=span, places=places)


def _unknown(number: int) -> Span:
    raise AssertionError(f"no call asked for the place of token {number}")


def _encoding(made: Any) -> Encoding:
    # The library's list of all spans takes longer than the few spans that labels need.
    return Encoding(ids=made.ids, span=made.token_to_chars)


def _pieces(passage: Passage) -> Iterator[tuple[Span, bool]]:
    """Yields the spans of a passage's pieces, without empty ones, and whether each is literal."""
    ends = [0, *(end for span in passage.literal for end in span), len(passage.text)]
    for number, (start, stop) in enumerate(pairwise(ends)):
        if start < stop:
            yield (start, stop), number % 2 == 1


def _check_characters(passage: Passage) -> None:
    """Refuses a text with half of a surrogate pair.

    Raises:
        ConfigError: the text has one.
    """
    try:
        passage.text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{passage.place}: the text has {passage.text[error.start]!a}, half of a surrogate"
            " pair, which is no character; write the whole character"
        ) from error
