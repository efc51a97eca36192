"""Bounds of time and memory for code that a model folder controls: tokenizers, regular expressions,
and numbers of modules (:mod:`penstock.host.limits.bounds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.host.limits.bounds import Bounds
from penstock.models.data.chat.encoder import ChatParts
from penstock.models.data.pieces.encoding import Encoded, Guard, unbounded
from penstock.models.data.reading.records import Document
from penstock.models.data.tokenizer import Tokenizer

OPENING_S = 300.0
"""CPU seconds to open a tokenizer; the largest take some 10."""
BUILDING_S = 1200.0
"""CPU seconds to build a model without weights, and to take it apart."""
ENCODING_S = 120.0
"""CPU seconds for a call of the library, in addition to those for the length of its texts."""
_BYTES_PER_S = 2000
"""Lower bound of a tokenizer's speed; usual ones encode some 300,000 bytes a second."""
_MOST_BYTES = 4
"""Bytes of a character."""


@dataclass(frozen=True, slots=True)
class BoundedTokenizer:
    """A tokenizer with a bound of CPU seconds for each document."""

    inner: Tokenizer
    name: str
    bounds: Bounds

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.inner.vocab_size

    @property
    def bos(self) -> int | None:
        """The id that the settings name for a beginning."""
        return self.inner.bos

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids in front of a text with special tokens."""
        with self.bounds.within(self._what("finding its special tokens"), ENCODING_S):
            return self.inner.prefix

    @property
    def eos(self) -> int | None:
        """The id that ends a document."""
        return self.inner.eos

    @property
    def mask(self) -> int | None:
        """The id that replaces a masked token; None without one."""
        return self.inner.mask

    def encode_documents(
        self, documents: Iterable[Document], guard: Guard = unbounded
    ) -> Iterator[Encoded]:
        """Yields the ids of documents in parts.

        Raises:
            ConfigError: the tokenizer ran out of memory, or panicked; or a document is too long.
        """
        what = self._what("encoding documents")

        @contextmanager
        def bounded(characters: int) -> Iterator[None]:
            cpu_s = ENCODING_S + _MOST_BYTES * characters / _BYTES_PER_S
            with guard(characters), self.bounds.within(what, cpu_s):
                yield

        return self.inner.encode_documents(documents, bounded)

    def token_id(self, text: str) -> int | None:
        """Returns the id of a token by its text."""
        return self.inner.token_id(text)

    def chat_parts(self) -> ChatParts:
        """Returns what conversations need."""
        return self.inner.chat_parts()

    def files(self) -> dict[str, bytes]:
        """Returns the tokenizer's files: path below a directory that ``AutoTokenizer`` can read ->
        content.
        """
        return self.inner.files()

    def _what(self, work: str) -> str:
        return f"data.tokenizer = {self.name!r}: {work}"
