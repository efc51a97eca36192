"""Long texts in pieces, with the token ids of one call. No torch.

Neighbouring pieces share an overlap, which is encoded in both. Both are cut at a place in the
overlap with the same tokens around it in both encodings. The tokenizer's reach
(:mod:`penstock.models.data.pieces.locality`) must end on both sides of the place. Then text in
front of the overlap decides no token behind the place, and text behind the overlap none in front.
So the place is a token boundary of the whole text, too. Two kinds of places qualify:

* The end of a word. Words are encoded alone, so the rest follows. Equal tokens show that both scans
  have a match that ends there. The left scan is the whole text's up to there, and the scan behind a
  match depends only on the text behind it.
* With byte pair encoding also the end of a token inside of a word. Merges across the end of a token
  depend on this token and the next one alone. Tokens are those of the whole word if each pair of
  neighbours is encoded as itself. Each pair of the result is in one of the two encodings.

Without such a place, pieces are joined into a longer one, which is encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from penstock.host.errors import ConfigError
from penstock.host.limits.cgroup import tightest_memory, usable_cpus
from penstock.models.data.pieces.locality import Locality, locality_of
from penstock.models.data.reading.records import Document

Ids = NDArray[np.uint32]
Guard = Callable[[int], AbstractContextManager[None]]
"""Makes the bounds of a call of the library that encodes this number of characters."""


def unbounded(characters: int) -> AbstractContextManager[None]:
    """Returns bounds that limit nothing."""
    return nullcontext()


BYTES_PER_CHARACTER = 300
"""Memory of an encoding, by the character of its text, while the library makes it."""

_BATCH_CHARACTERS = 1 << 20
_PIECE_CHARACTERS = 1 << 17
_LEAST_PIECE_CHARACTERS = 1 << 14
_OVERLAP_CHARACTERS = 1 << 11


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The next ids of a document, (tokens,), and whether they end it."""

    document: Document
    ids: Ids
    ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Characters of a batch, of a piece without its overlap, and of an overlap."""

    batch: int
    piece: int
    overlap: int

    @classmethod
    def here(cls) -> Sizes:
        """Returns sizes that give each core some pieces of a batch."""
        share = _BATCH_CHARACTERS // (2 * usable_cpus())
        piece = min(_PIECE_CHARACTERS, max(_LEAST_PIECE_CHARACTERS, share))
        return cls(batch=_BATCH_CHARACTERS, piece=piece, overlap=_OVERLAP_CHARACTERS)

    def for_reach(self, reach: int) -> Sizes:
        """Returns sizes with room in an overlap for the reach on both sides, at up to eight
        characters a break. Pieces are as long as overlaps, so that cuts are in order.
        """
        overlap = max(self.overlap, 16 * reach)
        return Sizes(batch=self.batch, piece=max(self.piece, overlap), overlap=overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a document. ``text`` ends with an overlap behind its first ``length`` characters,
    but for the ``last`` piece, where both are the rest of the document.
    """

    document: Document
    text: str
    length: int
    last: bool


class EncodeMany(Protocol):
    """Encodes texts with all cores."""

    def __call__(self, texts: list[str]) -> list[Encoding]:
        """Returns the encodings without special tokens."""


def encode_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    guard: Guard = unbounded,
    sizes: Sizes | None = None,
) -> Iterator[Encoded]:
    """Yields the ids of documents in parts.

    Raises:
        ConfigError: a text has no place where it may be cut, and is too long for one call.
    """
    sizes = sizes or Sizes.here()
    locality = locality_of(tokenizer)

    def encode(texts: list[str]) -> list[Encoding]:
        with guard(sum(map(len, texts))):
            return tokenizer.encode_batch(texts, add_special_tokens=False)

    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    joint = _Joint(locality, normalize)
    if locality is not None:
        sizes = sizes.for_reach(locality.reach)
    pieces = cut(documents, sizes) if locality is not None else whole(documents)
    chain: _Chain | None = None
    for batch in _batches(pieces, sizes.batch):
        for piece, encoding in zip(batch, encode([p.text for p in batch]), strict=True):
            chain = chain or _Chain(joint, encode)
            for ids in chain.add(piece, encoding):
                yield Encoded(piece.document, ids)
            if piece.last:
                yield end_of(piece.document)
                chain = None


def end_of(document: Document) -> Encoded:
    """Returns the end of a document, without ids."""
    return Encoded(document, np.empty(0, dtype=np.uint32), ends=True)


def cut(documents: Iterable[Document], sizes: Sizes) -> Iterator[Piece]:
    """Yields documents in pieces of some size, in order."""
    length, full = sizes.piece, sizes.piece + sizes.overlap
    for document in documents:
        rest = ""
        for part in document.parts:
            rest += part
            start = 0
            while len(rest) - start > full:
                text = rest[start : start + full]
                yield Piece(document=document, text=text, length=length, last=False)
                start += length
            rest = rest[start:]
        yield Piece(document=document, text=rest, length=len(rest), last=True)


def whole(documents: Iterable[Document]) -> Iterator[Piece]:
    """Yields each document as one piece.

    Raises:
        ConfigError: one is too long for the memory that there is.
    """
    for document in documents:
        parts, length = [], 0
        for part in document.parts:
            parts.append(part)
            length += len(part)
            check_length(document, length)
        yield Piece(document=document, text="".join(parts), length=length, last=True)


def check_length(document: Document, length: int) -> None:
    """Refuses to encode ``length`` characters in one call if memory is too small.

    Raises:
        ConfigError: the call would take more memory than is free.
    """
    if length <= _PIECE_CHARACTERS:
        return
    needed, free = length * BYTES_PER_CHARACTER, tightest_memory().available
    if needed > free:
        raise ConfigError(
            f"{document.place}: the tokenizer has to encode {length:,} characters or more in one"
            f" call, since no shorter piece is sure to give the same tokens; that takes about"
            f" {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free. Split the text"
            " into documents, or use another tokenizer (data.tokenizer)"
        )


def _batches(pieces: Iterable[Piece], characters: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + len(piece.text) > characters:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece.text) + 64  # an empty document takes memory, too
    if batch:
        yield batch


@dataclass(slots=True)
class _Tokens:
    """Tokens of an overlap: ``number`` of the first one in its encoding; ids, and where each token
    begins and ends in the overlap; whether it begins a word.
    """

    number: int
    ids: list[int]
    spans: list[tuple[int, int]]
    words: list[int | None]

    @classmethod
    def of(cls, encoding: Encoding, start: int, stop: int) -> _Tokens:
        """Returns the tokens that begin at characters ``start`` to ``stop - 1``."""
        first = _bisect(encoding, start)
        last = _bisect(encoding, stop)
        numbers = range(first, last)
        spans = [_span(encoding, number) for number in numbers]
        return cls(
            number=first,
            ids=encoding.ids[first:last],
            spans=[(begin - start, end - start) for begin, end in spans],
            words=[encoding.token_to_word(number) for number in numbers],
        )

    def begins(self, place: int, *, inside_words: bool) -> bool:
        """Returns whether a token begins where the one before it has ended, and with
        ``inside_words`` unset, a word.
        """
        (before, end), (begin, _) = self.spans[place - 1], self.spans[place]
        apart = begin >= end and begin > before
        return apart and (inside_words or self.words[place] != self.words[place - 1])


def _span(encoding: Encoding, number: int) -> tuple[int, int]:
    span: Any = encoding.token_to_chars(number)
    assert span is not None
    return int(span[0]), int(span[1])


def _bisect(encoding: Encoding, character: int) -> int:
    """Returns the number of the first token that begins at ``character`` or behind it."""
    low, high = 0, len(encoding)
    while low < high:
        middle = (low + high) // 2
        if _span(encoding, middle)[0] < character:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class _Cut:
    """The first token behind a cut, in the encoding on the left and in the one on the right."""

    left: int
    right: int


@dataclass(frozen=True, slots=True)
class _Joint:
    """Finds the places where neighbouring pieces may be cut."""

    locality: Locality | None
    normalize: Callable[[str], str]

    def find(self, left: Encoding, right: Encoding, start: int, overlap: str) -> _Cut | None:
        """Returns a cut in the overlap, which begins at character ``start`` of the left text; None
        without a place that is certain.
        """
        assert self.locality is not None
        ours = _Tokens.of(left, start, start + len(overlap))
        theirs = _Tokens.of(right, 0, len(overlap))
        count = self.locality.count(overlap)
        best: tuple[int, int, int] | None = None
        for first, other, length in _runs(ours, theirs):
            begin = ours.spans[first][0]
            end = min(len(overlap), ours.spans[first + length - 1][1])
            for step in range(1, length):
                place = ours.spans[first + step][0]
                sure = min(count[place] - count[begin], count[end - 1] - count[place])
                if (best is None or sure > best[0]) and self._may_cut(
                    ours, theirs, first + step, other + step
                ):
                    best = (int(sure), first + step, other + step)
        if best is None or best[0] < self.locality.reach:
            return None
        _, place, other = best
        if not self._is_sure(overlap, ours.spans[place][0]):
            return None
        return _Cut(ours.number + place, theirs.number + other)

    def _may_cut(self, ours: _Tokens, theirs: _Tokens, place: int, other: int) -> bool:
        assert self.locality is not None
        inside = self.locality.inside_words
        return ours.begins(place, inside_words=inside) and theirs.begins(other, inside_words=inside)

    def _is_sure(self, overlap: str, character: int) -> bool:
        """Returns whether the reach is over on both sides in the normalized text, too."""
        assert self.locality is not None
        for side in (overlap[:character], overlap[character:]):
            text = self.normalize(side)
            if not text or self.locality.count(text)[-1] < self.locality.reach:
                return False
        return True


def _runs(ours: _Tokens, theirs: _Tokens) -> Iterator[tuple[int, int, int]]:
    """Yields start and length of runs of the same tokens in both."""
    a = list(zip(ours.ids, ours.spans, strict=True))
    b = list(zip(theirs.ids, theirs.spans, strict=True))
    i = j = length = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            i, j, length = i + 1, j + 1, length + 1
            continue
        if length:
            yield i - length, j - length, length
            length = 0
        left, right = a[i][1], b[j][1]
        i, j = i + (left <= right), j + (right <= left)
    if length:
        yield i - length, j - length, length


class _Chain:
    """The pieces of one document, joined in order."""

    def __init__(self, joint: _Joint, encode: EncodeMany) -> None:
        self._joint, self._encode = joint, encode
        self._text, self._length = "", 0
        self._encoding: Encoding | None = None
        self._from = 0
        self._more: list[Piece] = []

    def add(self, piece: Piece, encoding: Encoding) -> Iterator[Ids]:
        """Takes the next piece; yields ids that are certain.

        Raises:
            ConfigError: pieces cannot be joined, and are too long for one call.
        """
        if self._encoding is None:
            self._take(piece, encoding, _Cut(0, 0))
        else:
            self._more.append(piece)
            if len(self._more) == 1:
                yield from self._cut(piece, encoding, self._length, self._text[self._length :])
        length = self._length + sum(p.length for p in self._more)
        if self._more and (piece.last or length >= 2 * self._length):
            start = self._join()
            if not piece.last:
                # More of the piece is the overlap now, for texts with few places. Its end is that
                # of the next overlap, so that cuts are in order.
                yield from self._cut(piece, encoding, start, piece.text[: piece.length])
        if piece.last:
            assert self._encoding is not None
            yield _ids(self._encoding, self._from, len(self._encoding))

    def _cut(self, piece: Piece, encoding: Encoding, start: int, overlap: str) -> Iterator[Ids]:
        """Continues with ``piece`` if it may be cut from the text before. The overlap begins at
        character ``start``. Yields the ids in front of the cut.
        """
        assert self._encoding is not None
        place = self._joint.find(self._encoding, encoding, start, overlap)
        if place is not None:
            yield _ids(self._encoding, self._from, place.left)
            self._take(piece, encoding, place)

    def _take(self, piece: Piece, encoding: Encoding, place: _Cut) -> None:
        self._text, self._length, self._encoding = piece.text, piece.length, encoding
        self._from, self._more = place.right, []

    def _join(self) -> int:
        """Encodes all waiting pieces as one; returns the character at which the last one begins."""
        last = self._more[-1]
        front = [self._text[: self._length], *(p.text[: p.length] for p in self._more[:-1])]
        start = sum(map(len, front))
        text = "".join([*front, last.text])
        check_length(last.document, len(text))
        (encoding,) = self._encode([text])
        assert self._encoding is not None
        if encoding.ids[: self._from] != self._encoding.ids[: self._from]:
            raise ConfigError(
                f"{last.document.place}: the tokenizer encodes the beginning of"
                f" {len(text):,} characters differently than that of a shorter piece; split the"
                " text into documents, or use another tokenizer (data.tokenizer)"
            )
        self._text, self._length, self._encoding = text, start + last.length, encoding
        self._more = []
        return start


def _ids(encoding: Encoding, start: int, stop: int) -> Ids:
    return np.asarray(encoding.ids, dtype=np.uint32)[start:stop]
