"""Files of rows: samples of tokens that stay apart. No torch.

A file of rows has three parts, all little-endian. First the tokens, uint32: an id with two marks
(:data:`COUNTS`, :data:`BEGINS`). Then the first token of each row, and the number of tokens at the
end, int64. Then two int64 numbers for each sample: its source, and its record in the source. The
samples stand in the order of their rows. A file with weights ends with a fp32 number for each
token: the factor of the loss of its prediction.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.host.errors import StateError
from penstock.host.files import writing
from penstock.models.data.batch import IGNORED_LABEL, MicroBatch, places_in_documents
from penstock.models.data.chunks import Checksums
from penstock.models.data.rows.packing import Rows

COUNTS = 1 << 31
"""Mark of a token that takes part in the loss: the token before it predicts it."""
BEGINS = 1 << 30
"""Mark of the first token of a sample."""
ID = BEGINS - 1

_TOKEN, _NUMBER, _WEIGHT = np.dtype("<u4"), np.dtype("<i8"), np.dtype("<f4")
_WRITE_TOKENS = _READ_TOKENS = 1 << 20

_LENGTHS = ("limit", "shortest", "longest")

Tokens = NDArray[np.uint32]
Weights = NDArray[np.float32]

_Kind = TypeVar("_Kind", np.uint32, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Sizes of a file of rows, as ``rows`` of an entry of ``meta.json``.

    ``length`` is the number of tokens of a row; a row may end before. ``pad`` is the id behind its
    end. ``weighted``: each token has a weight. ``limit``: a sample with more tokens changes the
    frequencies of its micro-batch; 0 without such a limit. ``shortest`` and ``longest``: tokens of
    samples.
    """

    rows: int
    samples: int
    tokens: int
    counted: int
    length: int
    pad: int
    packing: str
    weighted: bool = False
    limit: int = 0
    shortest: int = 0
    longest: int = 0

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> RowLayout | None:
        """Returns the layout of a split's entry; None where its file holds tokens alone.

        Raises:
            KeyError, TypeError, ValueError: the entry is damaged.
        """
        fields = entry.get("rows")
        if fields is None:
            return None
        needed = ("rows", "samples", "tokens", "counted", "length", "pad")
        return cls(
            **{name: int(fields[name]) for name in needed},
            **{name: int(fields.get(name, 0)) for name in _LENGTHS},
            packing=str(fields["packing"]),
            weighted=bool(fields.get("weighted", False)),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for ``meta.json``; ``weighted`` only if it is true, and lengths only
        with a limit.
        """
        unset = {*_LENGTHS} if not self.limit else set()
        fields = asdict(self)
        return {n: v for n, v in fields.items() if v is not False and n not in unset}

    def batch(
        self, rows: Sequence[Tokens], weights: Sequence[Weights | None] | None = None
    ) -> MicroBatch:
        """Returns the micro-batch of rows; see :func:`batch_of`. Padding decides no frequencies."""
        return batch_of(rows, self.length, self.pad, weights, lone_padding=self.limit > 0)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.weights_at + self.weighted * self.tokens * _WEIGHT.itemsize

    @property
    def rows_at(self) -> int:
        """Offset of the rows' first tokens; a multiple of 8."""
        return -(-self.tokens * _TOKEN.itemsize // _NUMBER.itemsize) * _NUMBER.itemsize

    @property
    def samples_at(self) -> int:
        """Offset of the samples' sources and records."""
        return self.rows_at + (self.rows + 1) * _NUMBER.itemsize

    @property
    def weights_at(self) -> int:
        """Offset of the tokens' weights, or the end of a file without weights."""
        return self.samples_at + 2 * self.samples * _NUMBER.itemsize


def marked(ids: Sequence[int], counted: Iterable[tuple[int, int]]) -> Tokens:
    """Returns a sample's tokens with marks; ``counted`` are the spans of tokens that count."""
    tokens = np.array(ids, dtype=np.uint32)
    for first, end in counted:
        tokens[first:end] |= np.uint32(COUNTS)
    tokens[0] |= np.uint32(BEGINS)
    return tokens


def count_counted(tokens: Tokens) -> int:
    """Returns how many of marked tokens take part in the loss."""
    parts = (tokens[first : first + _READ_TOKENS] for first in range(0, len(tokens), _READ_TOKENS))
    return sum(int(np.count_nonzero(part & np.uint32(COUNTS))) for part in parts)


def write_rows(
    path: Path,
    tokens: Tokens,
    begins: NDArray[np.int64],
    places: NDArray[np.int64],
    rows: Rows,
    update: Callable[[bytes], None],
    weights: Weights | None = None,
) -> None:
    """Writes a file of rows, and passes its bytes to ``update``. It is on disk when this returns.

    ``tokens`` are marked, of all samples one after the other. ``begins``, (samples + 1,), are the
    places of samples in them; ``places``, (samples, 2), their sources and records. ``weights`` are
    those of the tokens, of the same shape.

    Raises:
        CapacityError, ConfigError: the file cannot be written.
    """
    lengths = np.diff(begins)[rows.order]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    num_bytes = 4 * int(ends[-1]) + 8 * len(rows.starts) + 16 * len(rows.order)
    num_bytes += 0 if weights is None else _WEIGHT.itemsize * int(ends[-1])
    with writing(path, num_bytes), path.open("wb") as file:

        def write(content: bytes) -> None:
            file.write(content)
            update(content)

        for part in _in_order(tokens, begins, rows.order):
            write(part.astype(_TOKEN).tobytes())
        write(b"\0" * (-4 * int(ends[-1]) % _NUMBER.itemsize))
        write(ends[rows.starts].astype(_NUMBER).tobytes())
        write(places[rows.order].astype(_NUMBER).tobytes())
        for chunk in () if weights is None else _in_order(weights, begins, rows.order):
            write(chunk.astype(_WEIGHT).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _in_order(
    tokens: NDArray[_Kind], begins: NDArray[np.int64], order: NDArray[np.int64]
) -> Iterator[NDArray[_Kind]]:
    """Yields the tokens of samples, or their weights, in an order, in parts of about a million."""
    part: list[NDArray[_Kind]] = []
    size = 0
    for number in order:
        part.append(tokens[begins[number] : begins[number + 1]])
        size += len(part[-1])
        if size >= _WRITE_TOKENS:
            yield np.concatenate(part)
            part, size = [], 0
    if part:
        yield np.concatenate(part)


class RowFile:
    """A mapped file of rows."""

    def __init__(self, path: Path, layout: RowLayout, checksums: Checksums | None = None) -> None:
        """Maps the file. With ``checksums``, each read is compared with them.

        Raises:
            StateError: the file cannot be mapped, or is too short.
        """
        self.layout, self._checksums = layout, checksums
        self._path = path
        try:
            content = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise StateError(f"file of rows {path}: cannot map it: {error}") from error
        if min(layout.rows, layout.samples, layout.tokens) < 1 or len(content) != layout.num_bytes:
            raise StateError(
                f"file of rows {path}: has {len(content)} bytes, and {layout.rows} rows of"
                f" {layout.samples} samples and {layout.tokens} tokens have {layout.num_bytes}"
            )
        self._tokens = content[: layout.tokens * _TOKEN.itemsize].view(_TOKEN)
        samples_at = layout.samples_at
        self._starts = content[layout.rows_at : samples_at].view(_NUMBER)
        self._places = content[samples_at : layout.weights_at].view(_NUMBER).reshape(-1, 2)
        self._weights = content[layout.weights_at :].view(_WEIGHT)

    def row(self, number: int) -> Tokens:
        """Returns a row's tokens with marks, copied out of the file.

        Raises:
            StateError: the file has changed since its preparation.
        """
        first, end = self._span(number)
        self._check(first * _TOKEN.itemsize, end * _TOKEN.itemsize)
        return self._tokens[first:end].astype(np.uint32)

    def weights(self, number: int) -> Weights | None:
        """Returns the weights of a row's tokens, copied out of the file; None without weights.

        Raises:
            StateError: the file has changed since its preparation.
        """
        if not self.layout.weighted:
            return None
        first, end = self._span(number)
        place = self.layout.weights_at
        self._check(place + first * _WEIGHT.itemsize, place + end * _WEIGHT.itemsize)
        return self._weights[first:end].astype(np.float32)

    def _span(self, number: int) -> tuple[int, int]:
        """Returns the first token of a row in the file, and the end."""
        place = self.layout.rows_at + number * _NUMBER.itemsize
        self._check(place, place + 2 * _NUMBER.itemsize)
        first, end = self._starts[number : number + 2].tolist()
        if not 0 <= first < end <= min(self.layout.tokens, first + self.layout.length):
            raise StateError(f"file of rows {self._path}: row {number} is damaged")
        return first, end

    def places(self, row: int) -> list[tuple[int, int, int]]:
        """Returns source, record and number of tokens of each sample of a row.

        Raises:
            StateError: the file has changed since its preparation.
        """
        first, end = self._sample_rows[row : row + 2].tolist()
        tokens = self.row(row)
        begins = np.flatnonzero(tokens & BEGINS)
        place, size = self.layout.samples_at, self._places.itemsize * 2
        self._check(place + first * size, place + end * size)
        lengths = np.diff(np.append(begins, len(tokens))).tolist()
        origins = self._places[first:end].tolist()
        return [(*origin, length) for origin, length in zip(origins, lengths, strict=True)]

    @cached_property
    def _sample_rows(self) -> NDArray[np.int64]:
        """The first sample of each row, and the number of samples at the end, (rows + 1,)."""
        parts = [
            start + np.flatnonzero(self._tokens[start : start + _READ_TOKENS] & BEGINS)
            for start in range(0, self.layout.tokens, _READ_TOKENS)
        ]
        begins = np.concatenate(parts)
        if len(begins) != self.layout.samples:
            raise StateError(
                f"file of rows {self._path}: has {len(begins)} samples, and its description"
                f" {self.layout.samples}; delete it and prepare the run again"
            )
        return np.searchsorted(begins, self._starts)

    def _check(self, start: int, stop: int) -> None:
        if self._checksums is not None:
            self._checksums.check(start, stop)


def batch_of(
    rows: Sequence[Tokens],
    length: int,
    pad: int,
    weights: Sequence[Weights | None] | None = None,
    *,
    lone_padding: bool = False,
) -> MicroBatch:
    """Returns the micro-batch of rows of marked tokens, (rows, length). ``weights`` are those of
    each row's tokens; a label has the weight of its token.

    A label is the next token of the same sample where this token counts, else -100. With several
    samples in a row, positions restart at 0 and attention stays inside a sample. Ids ``pad`` behind
    the end belong to the last sample, and have no label. With ``lone_padding`` each of them is a
    document of its own, at position 0.
    """
    inputs = np.full((len(rows), length), pad, dtype=np.int64)
    labels = np.full_like(inputs, IGNORED_LABEL)
    begins = np.zeros(inputs.shape, dtype=bool)
    for number, row in enumerate(rows):
        inputs[number, : len(row)] = row & ID
        begins[number, 1 : len(row)] = row[1:] & BEGINS != 0
        begins[number, len(row) :] = lone_padding
        counts = (row[1:] & COUNTS != 0) & ~begins[number, 1 : len(row)]
        places = np.flatnonzero(counts)
        labels[number, places] = inputs[number, places + 1]
    batch = MicroBatch(input_ids=inputs, labels=labels, label_weights=_of_labels(labels, weights))
    if not begins.any():
        return batch
    positions, documents = places_in_documents(begins)
    return replace(batch, position_ids=positions, document_ids=documents)


def _of_labels(
    labels: NDArray[np.int64], weights: Sequence[Weights | None] | None
) -> Weights | None:
    """Returns the weight of each label, (rows, length), 0 where nothing counts; None without."""
    if not weights or any(row is None for row in weights):
        return None
    of_labels = np.zeros(labels.shape, dtype=np.float32)
    for number, row in enumerate(weights):
        assert row is not None
        of_labels[number, : len(row) - 1] = row[1:]
    return np.where(labels == IGNORED_LABEL, np.float32(0.0), of_labels)
