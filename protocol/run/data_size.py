"""Size of the training data. Users read passes over these data as epochs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from penstock.protocol.run.checksums import read_checked
from penstock.protocol.run.rundir import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Tokens and samples of one pass over the training data, without held-out sequences.

    A sample is a row of up to ``data.sequence_length`` tokens; a step consumes
    ``train.global_batch`` of them.
    """

    tokens: int
    samples: int

    @classmethod
    def of(cls, run: RunDirectory) -> TrainingData | None:
        """Reads the size of a run's training data; None where data are made up.

        Raises:
            StateError: the data's description is damaged.
        """
        if not (run.path / "data" / "meta.json").is_file():
            return None
        split = json.loads(read_checked(run.path, "data/meta.json"))["train"]
        tokens = int(split["num_tokens"])
        length = run.config.data.sequence_length
        rows = split.get("rows")
        samples = max(0, (tokens - 1) // length) if rows is None else int(rows["rows"])
        return cls(tokens=tokens, samples=samples)

    @classmethod
    def samples_of(cls, run: RunDirectory) -> int | None:
        """Reads the samples of one pass, as :meth:`of`."""
        data = cls.of(run)
        return None if data is None else data.samples

    def in_steps(self, steps: int, global_batch: int) -> str:
        """Returns a line with the tokens, and with the epochs of the given number of steps."""
        passes = epochs(steps * global_batch / self.samples) if self.samples else "no"
        return (
            f"data: {self.tokens:,} tokens; {steps:,} steps of {global_batch} sequences are"
            f" {passes} epochs"
        )


def epochs(passes: float) -> str:
    """Returns passes over the training data with two decimals; two digits of less than 0.1."""
    return f"{passes:,.2f}" if passes >= 0.1 or not passes else f"{passes:#.2g}"
