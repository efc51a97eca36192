"""Evaluation by transformers of a run's saved state or a Hugging Face folder on a file of data.

``python -m penstock.models.inference.evaluate PLACE SCRATCH`` answers in lines of JSON
(:mod:`penstock.models.inference.lines`). The rows are those of training. Each document of a row is
computed alone, so nothing of a row's other documents reaches it in any type of model.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.data import SourceConfig
from penstock.config.schema import Config
from penstock.config.values import NEXT_TOKEN
from penstock.host.errors import ConfigError
from penstock.models.data.batch import IGNORED_LABEL, MicroBatch
from penstock.models.data.chunks import SAY_EVERY_S
from penstock.models.data.marks import end_ids, marks_of_text
from penstock.models.data.objectives import NextToken
from penstock.models.data.rows.evaluation import with_training_data
from penstock.models.data.rows.row_file import RowFile, RowLayout
from penstock.models.data.rows.sources import makes_rows, sources_of
from penstock.models.data.tokenizer import open_tokenizer
from penstock.models.inference.lines import note, write_line
from penstock.models.inference.loading import ModelPlace, add_place, load_model, positions_of
from penstock.models.prepare import prepare
from penstock.protocol.run.process import tool_main

_LOGIT_BYTES = 2**29
"""Bytes of fp32 logits of a micro-batch, unless a single document has more."""
_CHUNK_ROWS = 256
"""Rows that are read together. Their documents are ordered by length, so that a micro-batch has
little padding.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """Token ids, and for each the next token to predict or -100; both (tokens,) int64."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRows:
    """The rows of a prepared file, each as a micro-batch of one."""

    count: int
    batches: Iterable[MicroBatch]


@dataclass(slots=True)
class LossSums:
    """LossSums over counted tokens: losses in fp32, added up in fp64, and right predictions."""

    loss: float = 0.0
    right: int = 0
    counted: int = 0

    def result(self, rows: int) -> dict[str, Any]:
        """Returns the means for the answer; a value that is not finite is None."""
        loss = self.loss / self.counted
        perplexity = math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf
        return {
            "loss": loss if math.isfinite(loss) else None,
            "perplexity": perplexity if math.isfinite(perplexity) else None,
            "token_accuracy": self.right / self.counted,
            "counted_tokens": self.counted,
            "rows": rows,
        }


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Returns loss, perplexity, token accuracy, counted tokens and rows.

    Raises:
        ConfigError: the model or the data cannot be used, or no token counts.
        StateError: the saved state is damaged.
    """
    place = ModelPlace.of(options)
    rows = prepared_rows(place, options.data, options.scratch)
    model = load_model(place, options.scratch)
    sums = measured(model, rows)
    if not sums.counted:
        raise ConfigError(f"--data {options.data}: no token of its {rows.count:,} rows counts")
    return sums.result(rows.count)


def prepared_rows(place: ModelPlace, file: str, scratch: Path) -> PreparedRows:
    """Returns the rows that a preparation makes of ``file``, with files in ``scratch``.

    Raises:
        ConfigError: a record cannot be read, or there is not one row.
    """
    config = with_training_data(place.config, SourceConfig(path=file))
    if config.trains_on_pairs:  # the loss of a file is that of its tokens, not of pairs
        data = config.data.model_copy(update={"objective": NEXT_TOKEN})
        config = config.model_copy(update={"data": data})
    run_dir = place.folder
    if place.state is None:
        run_dir = scratch / "run"
        run_dir.mkdir()
        prepare(config, run_dir, table_only=True, progress=note)
    tokenizer = open_tokenizer(config)
    marks = None if tokenizer is None else marks_of_text(config, tokenizer)
    directory = scratch / "data"
    directory.mkdir()
    rows = tokenizer is not None and makes_rows(config)
    sources = sources_of(config, tokenizer, marks, run_dir, note, makes_rows=rows)
    entry = sources.write(directory)["train"]
    layout = RowLayout.of(entry)
    if layout is None:
        return _token_rows(directory / entry["path"], entry, config, file)
    tally = entry["tally"]
    changed = [f"{tally[name]:,} {name}" for name in ("truncated", "split", "dropped", "skipped")]
    note(
        f"{file}: {tally['records']:,} records, {layout.samples:,} samples, {layout.rows:,} rows;"
        f" {', '.join(changed)}"
    )
    file_of_rows = RowFile(directory / entry["path"], layout)
    numbers = range(layout.rows)
    batches = (layout.batch([file_of_rows.row(n)]) for n in numbers)
    return PreparedRows(count=layout.rows, batches=batches)


def _token_rows(path: Path, entry: dict[str, Any], config: Config, file: str) -> PreparedRows:
    """Returns the whole rows of a token file.

    Raises:
        ConfigError: the file has not one row.
    """
    length = config.data.sequence_length
    tokens = np.memmap(path, dtype=np.dtype(entry["token_dtype"]).newbyteorder("<"), mode="r")
    count = max(0, entry["num_tokens"] - 1) // length
    if not count:
        raise ConfigError(
            f"--data {file}: has {entry['num_tokens']:,} tokens; one row of data.sequence_length ="
            f" {length} takes {length + 1}"
        )
    ends = end_ids(entry["eos"]) if config.data.document_masks else ()
    objective = NextToken(ends=ends)

    def batches() -> Iterator[MicroBatch]:
        for row in range(count):
            start = entry["first_token"] + row * length
            part = tokens[start : start + length + 1].astype(np.int64)
            yield objective(part[None], row)

    return PreparedRows(count=count, batches=batches())


def documents_of(batch: MicroBatch) -> Iterator[RowPart]:
    """Yields the documents of a row that have counted tokens, each up to its last one.

    A causal model's predictions do not depend on later tokens.
    """
    ids, labels = batch.input_ids[0], batch.labels[0]
    cuts = np.zeros(0, dtype=np.int64)
    if batch.document_ids is not None:
        cuts = np.flatnonzero(np.diff(batch.document_ids[0])) + 1
    for part, targets in zip(np.split(ids, cuts), np.split(labels, cuts), strict=True):
        counted = np.flatnonzero(targets != IGNORED_LABEL)
        if len(counted):
            end = int(counted[-1]) + 1
            yield RowPart(ids=part[:end], labels=targets[:end])


def measured(model: Any, rows: PreparedRows) -> LossSums:
    """Returns the sums of a model over the documents of rows.

    Raises:
        ConfigError: a document is longer than the model's positions.
    """
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    most = max(1, _LOGIT_BYTES // (4 * vocab_size))
    positions, alike = positions_of(model) or sys.maxsize, _length_decides(model)
    sums, done, said_s = LossSums(), 0, time.monotonic()
    remaining = iter(rows.batches)
    while chunk := list(islice(remaining, _CHUNK_ROWS)):
        documents = [document for batch in chunk for document in documents_of(batch)]
        documents.sort(key=lambda document: len(document.ids))
        if documents and len(documents[-1].ids) > positions:
            raise ConfigError(
                f"data.sequence_length: a document has {len(documents[-1].ids):,} tokens, and the"
                f" model has {positions:,} positions; give --config with a smaller one"
            )
        for group in _grouped(documents, most, alike=alike):
            _add(sums, model, group)
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                note(
                    f"evaluates: {done:,} of {rows.count:,} rows, mean loss"
                    f" {sums.loss / sums.counted:.4f} so far"
                )
        done += len(chunk)
    return sums


def _length_decides(model: Any) -> bool:
    """Returns whether the longest document of a micro-batch decides rotary frequencies."""
    kinds = {str(getattr(module, "rope_type", "")) for module in model.modules()}
    return any(name in kind for kind in kinds for name in ("dynamic", "longrope"))


def _grouped(documents: Sequence[RowPart], most: int, *, alike: bool) -> Iterator[list[RowPart]]:
    """Yields documents, shortest first, in groups of at most ``most`` tokens with padding;
    ``alike``: each group has documents of one length.
    """
    group: list[RowPart] = []
    for document in documents:
        differs = alike and bool(group) and len(document.ids) != len(group[0].ids)
        if group and (differs or (len(group) + 1) * len(document.ids) > most):
            yield group
            group = []
        group.append(document)
    if group:
        yield group


def _add(sums: LossSums, model: Any, documents: Sequence[RowPart]) -> None:
    """Adds a micro-batch of documents to the sums. Padding is behind each document's end, where a
    causal model's predictions do not see it.
    """
    shape = (len(documents), max(len(document.ids) for document in documents))
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
    for number, document in enumerate(documents):
        ids[number, : len(document.ids)] = document.ids
        labels[number, : len(document.ids)] = document.labels
    expected = torch.from_numpy(labels).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=False).logits
        counts = expected != IGNORED_LABEL
        chosen, targets = logits[counts].float(), expected[counts]
        losses = torch.nn.functional.cross_entropy(chosen, targets, reduction="none")
        sums.loss += float(losses.double().sum())
        sums.right += int((chosen.argmax(dim=-1) == targets).sum())
    sums.counted += len(targets)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the evaluation; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.inference.evaluate", description=__doc__)
    add_place(parser)
    parser.add_argument("--data", required=True, help="file, folder or glob of data")
    options = parser.parse_args(arguments)
    return tool_main(
        lambda: write_line("result", evaluate(options)), options.place, options.parent_pid
    )


if __name__ == "__main__":
    sys.exit(main())
