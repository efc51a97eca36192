"""Records of the data, and steps of a pass over the data.

transformers ends each pass with a smaller batch, and rounds the steps of a pass up. Penstock fills
the batch with the first rows of the next pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from penstock.client.convert.keys import Effect
from penstock.client.convert.reading import KeyReading
from penstock.host.inputs import read_text

REGISTRY = "dataset_info.json"
"""File name of LLaMA-Factory's registry of data sets."""

_REGISTRY_BYTES = 16 << 20
MAX_BYTES = 64 << 20
"""Most bytes of data that a conversion reads to count records."""

_BORDERS = (
    "Penstock fills the last batch of a pass with rows of the next pass, and the trainer has a"
    " smaller batch"
)


_HOLDS_OUT = ("val_size", "val_set_size", "test_split_size")
"""Keys that take records out of the training data."""


def put_epochs(reading: KeyReading, key: str, batch: int) -> None:
    """Sets ``train.epochs``.

    If the records are known not to fill the last batch of a pass, the key also changes the result:
    the trainer takes more steps. ``batch`` is the number of sequences of a device in a step of
    accumulation.
    """
    epochs = float(reading.get(key))
    count = _rows(reading)
    reading.put("train.epochs", epochs, key, note="" if count else _BORDERS)
    total = reading.config["train"]["global_batch"]
    if not count or count % total == 0:
        return
    theirs = steps_of(count, batch, reading.get("gradient_accumulation_steps"), reading.devices)
    passes = Fraction(str(epochs))
    ours = max(1, math.ceil(passes * count / total))
    reading.drop(
        key,
        f"{_BORDERS}: {count:,} records at a batch of {total:,} are {math.ceil(passes * theirs):,}"
        f" steps there and {ours:,} here; choose a batch that divides the records, or set"
        " train.steps in place of train.epochs",
        Effect.RESULT,
        value=epochs,
    )


def steps_of_pass(reading: KeyReading) -> int | None:
    """Returns the steps of a pass, where records are known to fill all its batches."""
    count, batch = _rows(reading), reading.config["train"]["global_batch"]
    return None if not count or count % batch else count // batch


def steps_of(count: int, batch: int, accumulation: int, devices: int) -> int:
    """Returns the steps that transformers takes in one pass over ``count`` rows."""
    batches = math.ceil(count / (batch * devices))
    return max(1, math.ceil(batches / accumulation))


def _rows(reading: KeyReading) -> int | None:
    """Returns the number of records where each is a row; None if that is not known.

    Records that share rows, held-out records, and files that are large or in other formats than
    JSON leave the number unknown.
    """
    data = reading.config["data"]
    if data.get("packing") != "none" or any(reading.values.get(key) for key in _HOLDS_OUT):
        return None
    counts = [_records(source) for source in data["sources"]]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _records(source: Mapping[str, Any]) -> int | None:
    """Returns the number of records of a source; None if that is not known."""
    if "registry" in source:
        registry, name = Path(source["registry"]), source["name"]
        entry = entries_of(registry, [name]).get(name, {})
        if not isinstance(entry.get("file_name"), str) or entry.get("num_samples") is not None:
            return None
        count = counted_records(registry.parent / entry["file_name"])
    else:
        count = counted_records(Path(source["path"]))
    return None if count is None else min(count, source.get("limit", count))


def entries_of(registry: Path, names: list[str]) -> Mapping[str, dict[str, Any]]:
    """Returns the entries of data sets in a readable registry."""
    try:
        entries = json.loads(read_text(registry, _REGISTRY_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {name: entries[name] for name in names if isinstance(entries.get(name), dict)}


def counted_records(path: Path) -> int | None:
    """Returns the number of records of a JSON file; None if the file cannot be read, is large, or
    has another format.
    """
    if path.suffix not in (".json", ".jsonl"):
        return None
    try:
        text = read_text(path, MAX_BYTES)
        if text.lstrip().startswith("["):
            return len(json.loads(text))
    except (OSError, ValueError, RecursionError):
        return None
    # A line feed alone ends a line of JSON lines: texts may hold other ends of lines.
    return sum(1 for line in text.split("\n") if line.strip())
