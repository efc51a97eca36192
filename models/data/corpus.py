"""Writing documents as a token file. No torch.

A token file is ids of one width, little-endian, every document between its marks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from penstock.host.errors import ConfigError
from penstock.host.files import cannot_write
from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.marks import Marks
from penstock.models.data.pieces.encoding import Encoded
from penstock.models.data.reading.records import Document
from penstock.models.data.tokenizer import Tokenizer


def token_dtype(vocab_size: int) -> str:
    """Returns the type of ids in a token file: ``uint16`` where every id fits, else ``uint32``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_tokens(
    texts: Iterable[Document],
    tokenizer: Tokenizer,
    path: Path,
    hasher: ChunkHasher,
    marks: Marks,
    *,
    vocab_size: int,
) -> int:
    """Writes a token file; returns its number of tokens. The file is on disk when this returns.

    Each document is its ids in little-endian :func:`token_dtype`, between its ``marks``. Marks that
    a text has itself stand once. Ready ids get no marks. ``hasher`` takes every byte of the file.
    ``vocab_size`` is the model's.

    Raises:
        CapacityError, ConfigError: it cannot be written, or a text has a token that the model has
            not.
    """
    dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    before, after = (np.asarray(ids, dtype).tobytes() for ids in (marks.before, marks.after))
    num_bytes = length = 0
    begins, tail = True, b""
    try:
        with path.open("wb") as file:
            for part in _encoded(texts, tokenizer):
                length = len(part.ids) if begins else length + len(part.ids)
                ready = part.document.ids is not None
                # Ready ids may be beyond those of the tokenizer, which decide the type.
                most = min(vocab_size, tokenizer.vocab_size) if ready else vocab_size
                _check_ids(part, length, most)
                content = part.ids.astype(dtype).tobytes()
                tail = content if begins else tail + content
                if not ready:
                    begun = begins and not content.startswith(before)
                    open_ = part.ends and not tail.endswith(after)
                    content = before * begun + content + after * open_
                tail = tail[-len(after) :] if after else b""
                num_bytes += len(content)
                file.write(content)
                hasher.update(content)
                begins = part.ends
            # On disk before meta.json marks the file as complete.
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error, num_bytes) from error
    return num_bytes // dtype.itemsize


def _encoded(texts: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yields the ids of documents in parts, in order; ready ids as they are."""
    for ready, group in itertools.groupby(texts, key=lambda document: document.ids is not None):
        if not ready:
            yield from tokenizer.encode_documents(group)
            continue
        for document in group:
            yield Encoded(document, np.array(document.ids, dtype=np.uint32), ends=True)


def _check_ids(part: Encoded, length: int, vocab_size: int) -> None:
    """Refuses a token without a row in the model. Tokenizers of published models may have such
    tokens, which no text uses. ``length``: tokens of the document up to the end of ``part``.
    """
    ids = part.ids
    if len(ids) and int(ids.max()) >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        if part.document.ids is not None:
            raise ConfigError(
                f"{part.document.place}: has the token {ids[first]}, and the vocabulary has"
                f" {vocab_size} tokens; name the model and tokenizer that the ids were made for"
            )
        raise ConfigError(
            f"{part.document.place}: token {length - len(ids) + first} of the text has id"
            f" {ids[first]}, and the model has a vocabulary of {vocab_size}; take that token out of"
            " the text, or give a tokenizer that goes with the model (data.tokenizer)"
        )
