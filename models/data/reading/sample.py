"""The first records of a source as a file: ``python -m penstock.models.data.reading.sample SOURCE
OUT BYTES``. No torch.

``OUT`` has a JSON line for each record, or for each part of a text. The only line of the answer is
an object: ``whole`` tells whether the records end before ``BYTES`` are written, and ``pairs``
whether the first record has two answers, of which one is better.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.models.data.reading.record import TEXT
from penstock.models.data.reading.records import records
from penstock.models.data.sources import find_source
from penstock.protocol.run.process import tool_main

_ANSWERS = frozenset(("chosen", "rejected"))
"""Columns of a pair of answers."""


def write_sample(source: str, output: Path, limit: int) -> dict[str, bool]:
    """Writes the first records of a source, at least ``limit`` bytes if the source has so many.
    Returns ``whole``, whether the source has no more, and ``pairs``, whether it has pairs.

    Raises:
        ConfigError: the source cannot be found or read.
    """
    written, pairs = 0, False
    with output.open("w", encoding="utf-8") as file:
        for fields in _fields(source):
            if written >= limit:
                return {"whole": False, "pairs": pairs}
            if not written:
                pairs = fields.keys() >= _ANSWERS
            line = json.dumps(fields, default=str)
            file.write(f"{line}\n")
            written += len(line) + 1
    return {"whole": True, "pairs": pairs}


def _fields(source: str) -> Iterator[Mapping[str, Any]]:
    for record in records(find_source(source, any_records=True)):
        if record.where:
            yield record.fields
        else:
            yield from ({TEXT: part} for part in record.parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the sample; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock.models.data.reading.sample", description=__doc__
    )
    parser.add_argument("source")
    parser.add_argument("output", type=Path)
    parser.add_argument("bytes", type=int)
    parser.add_argument("--parent-pid", type=int)
    options = parser.parse_args(arguments)

    def work() -> None:
        answer = write_sample(options.source, options.output, options.bytes)
        sys.stdout.write(json.dumps(answer) + "\n")

    return tool_main(work, options.output, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
