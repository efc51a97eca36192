"""``python -m penstock.workers.first_pass RUN_DIR``: writes the training data as JSON lines.

The first line is a summary. A line for each row of the first pass follows, in training order. No
process of a run takes part, and nothing needs torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.host.files import parse_json
from penstock.models.data.batch import IGNORED_LABEL, places_in_documents
from penstock.models.data.objectives import Masked, NextToken
from penstock.models.data.rows.row_file import BEGINS, COUNTS, ID
from penstock.models.data.tokenizer import open_tokenizer
from penstock.protocol.run.data_size import CUTS, RowCounts, TrainingData
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.workers.data import RowDataset, TokenDataset, open_dataset

_READ_ROWS = 256

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A row of the first pass. All arrays have the shape (tokens,), without padding.

    ``labels`` are ids of the same places (not shifted), or -100. ``samples`` are source, record and
    number of tokens of each sample; a piece of a text has no record. ``weights``: factors of the
    labels' losses, with ``data.objective: weighted``.
    """

    samples: Sequence[tuple[int, int | None, int]]
    input_ids: Ids
    labels: Ids
    position_ids: Ids
    document_ids: Ids
    weights: NDArray[np.float32] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of ``penstock data --json``, without the row's number."""
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "document_ids": self.document_ids,
            **({} if self.weights is None else {"weights": self.weights}),
        }
        return {
            "samples": self._samples(),
            **{name: values.tolist() for name, values in arrays.items()},
        }

    def to_text(self, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Returns samples with their text in spans: whether the span's tokens count, and text."""
        ends = itertools.accumulate(length for _, _, length in self.samples)
        spans = [
            [
                [counts, decode([token for token, _ in span])]
                for counts, span in itertools.groupby(
                    zip(
                        self.input_ids[end - length : end].tolist(),
                        (self.labels[end - length : end] != IGNORED_LABEL).tolist(),
                        strict=True,
                    ),
                    key=lambda pair: pair[1],
                )
            ]
            for end, (_, _, length) in zip(ends, self.samples, strict=True)
        ]
        return {"samples": self._samples(), "spans": spans}

    def _samples(self) -> list[dict[str, int | None]]:
        names = ("source", "record", "tokens")
        return [dict(zip(names, sample, strict=True)) for sample in self.samples]


def row_of_samples(dataset: RowDataset, place: int) -> Row:
    """Returns the row at a place of the first pass.

    Raises:
        StateError: the file has changed since its preparation.
    """
    (number,) = dataset.rows(place, 1).tolist()
    tokens = dataset.file.row(number)
    ids = (tokens & ID).astype(np.int64)
    begins = tokens & BEGINS != 0
    begins[0] = False
    positions, documents = places_in_documents(begins[np.newaxis])
    return Row(
        samples=dataset.file.places(number),
        input_ids=ids,
        labels=np.where(tokens & COUNTS, ids, IGNORED_LABEL),
        position_ids=positions[0],
        document_ids=documents[0],
        weights=dataset.file.weights(number),
    )


def row_of_text(dataset: TokenDataset, place: int) -> Row:
    """Returns the sequence at a place of the first pass.

    The label that predicts the first token of the text's next sequence is left out.

    Raises:
        StateError: the tokens have changed since their preparation.
    """
    (batch,) = dataset.read(place, 1, 1)
    ids, labels = batch.input_ids[0], batch.labels[0]
    if len(labels) == len(ids) and not isinstance(dataset.objective, Masked):
        first = ids[0] if isinstance(dataset.objective, NextToken) else IGNORED_LABEL
        labels = np.concatenate([[first], labels[:-1]])
    positions, documents = batch.position_ids, batch.document_ids
    return Row(
        samples=[(0, None, len(ids))],
        input_ids=ids,
        labels=labels,
        position_ids=np.arange(len(ids)) if positions is None else positions[0],
        document_ids=np.zeros_like(ids) if documents is None else documents[0],
    )


def summary(config: Config, entry: dict[str, Any], dataset: RowDataset | TokenDataset) -> Any:
    """Returns the summary of ``penstock data --json``. ``entry`` is that of the split."""
    data, rows = config.data, dataset.num_sequences
    counts = RowCounts.of(entry)
    if counts is None:
        length = data.sequence_length
        fields: dict[str, Any] = {"records": None, "samples": rows, "rows": rows}
        fields |= {"tokens": rows * length, "counted_tokens": _counted(dataset)}
        fields |= {"padding_share": 0.0, **dict.fromkeys(CUTS, 0), "duplicates": None}
        fields["lengths"] = dict.fromkeys(("min", "p50", "p90", "p99", "max"), length)
        key = "sources" if data.sources else "path" if data.tokens is None else "tokens"
        samples = {f"data.{key}": rows}
    else:
        fields = {"records": counts.records, "samples": counts.samples, "rows": counts.rows}
        fields |= {"tokens": counts.tokens, "counted_tokens": counts.counted}
        fields |= {"padding_share": counts.padding_share, **counts.cuts}
        fields |= {name: entry["tally"][name] for name in ("duplicates", "lengths")}
        samples = entry["tally"]["sources"]
    paths = [source.path or f"{source.registry}, {source.name}" for source in data.sources] or [
        str(data.path or data.tokens)
    ]
    if counts is None:
        paths = [", ".join(paths)]
    sources = [
        {"source": number, "name": name, "path": path, "samples": count}
        for number, ((name, count), path) in enumerate(zip(samples.items(), paths, strict=True))
    ]
    steps, epochs = config.train.steps, config.train.epochs
    if epochs is not None:
        one_pass = TrainingData(tokens=rows * data.sequence_length, samples=rows)
        steps = one_pass.steps_of(epochs, config.train.global_batch)
    return fields | {"rows_per_epoch": rows, "steps": steps, "sources": sources}


def _counted(dataset: RowDataset | TokenDataset) -> int:
    """Returns the tokens of a pass that count in the loss."""
    rows = dataset.num_sequences
    return sum(
        batch.counted_tokens
        for start in range(0, rows, _READ_ROWS)
        for batch in dataset.read(start, min(_READ_ROWS, rows - start), _READ_ROWS)
    )


def lines(run: RunDirectory, first: int, end: int | None, *, text: bool) -> Iterator[Any]:
    """Yields the summary and the rows ``first`` to ``end - 1``. With ``text``, rows have text in
    place of numbers.

    Raises:
        ConfigError: there is no row ``first``.
        StateError: the data have changed since their preparation.
    """
    config, data_dir = run.config, run.path / "data"
    dataset = open_dataset(data_dir, "train", config)
    assert isinstance(dataset, (RowDataset, TokenDataset))
    rows = dataset.num_sequences
    if first >= rows:
        raise ConfigError(f"--rows {first}:{end or ''}: the first pass has {rows:,} rows, from 0")
    entry = parse_json((data_dir / "meta.json").read_bytes())["train"]
    yield summary(config, entry, dataset)
    decode = decoder(config) if text else None
    for place in range(first, rows if end is None else min(rows, end)):
        if isinstance(dataset, RowDataset):
            row = row_of_samples(dataset, place)
        else:
            row = row_of_text(dataset, place)
        yield {"row": place, **(row.to_json() if decode is None else row.to_text(decode))}


def decoder(config: Config) -> Callable[[Sequence[int]], str]:
    """Returns the function that makes text of ids; without a tokenizer, text of numbers."""
    try:
        tokenizer = open_tokenizer(config)
        library = None if tokenizer is None else tokenizer.chat_parts().library
    except ConfigError:
        library = None  # a tokenizer in Python alone, which trains on text
    if library is None:
        return lambda ids: " ".join(map(str, ids)) + " "
    return lambda ids: str(library.decode(ids, skip_special_tokens=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.workers.first_pass", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory with prepared data")
    parser.add_argument("--first", type=int, default=0, help="first row")
    parser.add_argument("--end", type=int, help="end of the rows; unset, all")
    parser.add_argument("--text", action="store_true", help="write text in place of numbers")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        run = RunDirectory(options.run_dir)
        for line in lines(run, options.first, options.end, text=options.text):
            sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    return tool_main(work, options.run_dir, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
