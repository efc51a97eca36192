"""Size of the training data. Users read passes over these data as epochs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from penstock.config.schema import Config
from penstock.protocol.run.checksums import read_checked

CUTS = {
    "truncated": "samples truncated",
    "split": "samples split",
    "dropped": "samples dropped",
    "skipped": "records skipped",
    "empty": "records empty",
    "uncounted": "samples without a token that counts",
}
"""Words for the counts of a preparation's tally that lose or cut data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedLengths:
    """Tokens of the shortest and the longest sample of a split. A sample beyond ``limit`` tokens
    changes the rotary frequencies of all samples of its micro-batch.
    """

    shortest: int
    longest: int
    limit: int

    @classmethod
    def of(cls, rows: Mapping[str, Any]) -> LimitedLengths | None:
        """Returns the lengths of a file of rows; None without a limit."""
        if not rows.get("limit"):
            return None
        return cls(**{name: int(rows[name]) for name in cls.__slots__})

    @property
    def mixed(self) -> bool:
        """True if some samples are beyond the limit and others are not."""
        return self.shortest <= self.limit < self.longest


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Counts of the preparation of rows. A sample belongs to a record, and lies in a row of up to
    ``length`` tokens. ``counted`` tokens take part in the loss. ``cuts``: records and samples that
    were cut or left out, by reason. ``lengths``: those of samples, if the longest one of a
    micro-batch may decide the frequencies of all.
    """

    records: int
    samples: int
    rows: int
    length: int
    tokens: int
    counted: int
    cuts: Mapping[str, int]
    lengths: LimitedLengths | None = None

    @classmethod
    def of(cls, split: Mapping[str, Any]) -> RowCounts | None:
        """Returns the counts of a split of ``data/meta.json``; None where rows are cut from one
        text.
        """
        rows = split.get("rows")
        if rows is None:
            return None
        names = ("samples", "rows", "length", "tokens", "counted")
        tally = split["tally"]
        return cls(
            records=int(tally["records"]),
            cuts={name: int(tally.get(name, 0)) for name in CUTS},
            lengths=LimitedLengths.of(rows),
            **{name: int(rows[name]) for name in names},
        )

    @property
    def padding_share(self) -> float:
        """The share of places in rows without a token."""
        return 1 - self.tokens / (self.rows * self.length)

    def __str__(self) -> str:
        made = [f"{CUTS[name]}: {count:,}" for name, count in self.cuts.items() if count]
        return (
            f"{self.records:,} records, {self.samples:,} samples in {self.rows:,} rows of"
            f" {self.length:,} tokens, {self.padding_share:.1%} padding; {self.tokens:,} tokens,"
            f" {self.counted / self.tokens:.1%} count; {', '.join(made) or 'none cut or left out'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Tokens and samples of one pass over the training data, without held-out sequences.

    A sample is a row of up to ``data.sequence_length`` tokens; a step consumes
    ``train.global_batch`` of them. ``counts`` describe rows of whole samples.
    """

    tokens: int
    samples: int
    counts: RowCounts | None = None

    @property
    def restarts_positions(self) -> bool:
        """True if positions restart within rows: these hold several samples, or padding that
        decides no frequencies.
        """
        counts = self.counts
        return counts is not None and (counts.samples > counts.rows or counts.lengths is not None)

    @classmethod
    def of(cls, run_dir: Path, config: Config) -> TrainingData | None:
        """Reads the size of a run's training data; None where data are made up, or not prepared.

        Raises:
            StateError: the data's description is damaged.
        """
        if not (run_dir / "data" / "meta.json").is_file():
            return None
        split = json.loads(read_checked(run_dir, "data/meta.json"))["train"]
        tokens, counts = int(split["num_tokens"]), RowCounts.of(split)
        length = config.data.sequence_length
        samples = max(0, (tokens - 1) // length) if counts is None else counts.rows
        return cls(tokens=tokens, samples=samples, counts=counts)

    def steps_of(self, epochs: float, global_batch: int) -> int:
        """Returns the steps of ``epochs`` passes, rounded up. A step may take the last rows of a
        pass and the first rows of the next one.
        """
        rows = Fraction(str(epochs)) * self.samples  # exact: 0.1 epochs of 30 rows are 3 rows
        return max(1, math.ceil(rows / global_batch))

    def in_steps(self, steps: int, global_batch: int) -> str:
        """Returns a line with the sizes, and with the epochs of the given number of steps. Of rows
        of whole samples, the line also has cuts and skips.
        """
        passes = epochs(steps * global_batch / self.samples) if self.samples else "no"
        sizes = f"{self.tokens:,} tokens" if self.counts is None else str(self.counts)
        return f"data: {sizes}; {steps:,} steps of {global_batch} sequences are {passes} epochs"


def mixed_lengths(run_dir: Path) -> LimitedLengths | None:
    """Returns the lengths of the first split with samples on both sides of a limit; None without
    one.

    Raises:
        StateError: the data's description is damaged.
    """
    if not (run_dir / "data" / "meta.json").is_file():
        return None
    splits = json.loads(read_checked(run_dir, "data/meta.json")).values()
    for split in splits:
        lengths = LimitedLengths.of(split.get("rows") or {}) if isinstance(split, dict) else None
        if lengths is not None and lengths.mixed:
            return lengths
    return None


def with_known_steps(config: Config, run_dir: Path) -> Config:
    """Returns the configuration with the steps that ``train.epochs`` takes over the prepared data
    of a run directory. Without prepared data or ``train.epochs``, returns it as it is.
    """
    if config.train.epochs is None:
        return config
    data = TrainingData.of(run_dir, config)
    if data is None:
        return config
    return config.with_steps(data.steps_of(config.train.epochs, config.train.global_batch))


def epochs(passes: float) -> str:
    """Returns passes over the training data with two decimals; two digits of less than 0.1."""
    return f"{passes:,.2f}" if passes >= 0.1 or not passes else f"{passes:#.2g}"
