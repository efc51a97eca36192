"""Figures at the end of a training: losses, evaluations, speed and time of one start."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.client.views.display import duration
from penstock.client.views.run_view import Metrics, numbers

COMPARED_STEPS = 20
"""Largest number of steps, at each end of a run, in a mean loss of the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A value and its step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a run and of its newest start.

    ``losses`` are the training losses of all steps, in order. ``evaluated`` and ``best`` are the
    newest and the least held-out loss, or None. ``here`` is the number of steps of this start,
    ``training_s`` their seconds, and ``tokens_per_second`` their rate, or None.
    """

    step: int
    losses: tuple[Reading, ...]
    evaluated: Reading | None
    best: Reading | None
    here: int
    training_s: float
    tokens_per_second: float | None

    @classmethod
    def of(cls, metrics: Sequence[Metrics], first: int) -> Summary:
        """Returns the figures of lines of metrics; ``first`` is the index of this start's first
        line.
        """
        steps, held_out = _by_step(metrics, "train"), _readings(_of_first_set(metrics))
        # A start may append a line of the previous start, restored from the journal.
        past = max(numbers(line.get("epoch") for line in metrics[:first]), default=-1)
        fresh = [
            line
            for line in metrics[first:]
            if not any(epoch <= past for epoch in numbers([line.get("epoch")]))
        ]
        here = _by_step(fresh, "train")
        seconds = sum(numbers(line.get("seconds") for line in here))
        tokens = sum(numbers(line.get("tokens") for line in here))
        return cls(
            step=steps[-1]["step"] if steps else 0,
            losses=_readings(steps),
            evaluated=held_out[-1] if held_out else None,
            best=min(held_out, key=lambda reading: reading.value, default=None),
            here=len(here),
            training_s=seconds,
            tokens_per_second=tokens / seconds if seconds > 0.0 else None,
        )

    def __repr__(self) -> str:
        """Returns the figures in a few short lines, without the loss of each step."""
        lines = [f"step {self.step:,}"]
        if self.here:
            rate = self.tokens_per_second
            speed = "" if rate is None else f" at {rate:,.0f} tokens/s"
            lines.append(f"this start     {_counted(self.here)}{speed}")
        if self.loss is not None:
            lines.append(f"loss           {self.loss.value:.4f} at step {self.loss.step:,}")
        for name, reading in (("held-out loss", self.evaluated), ("best", self.best)):
            if reading is not None:
                lines.append(f"{name:<14} {reading.value:.4f} at step {reading.step:,}")
        return "\n".join(lines)

    @property
    def loss(self) -> Reading | None:
        """The newest training loss, or None. A skipped step has no loss."""
        return self.losses[-1] if self.losses else None

    def lines(self, seconds: float) -> Iterator[str]:
        """Yields the lines of the summary. ``seconds`` is the duration of this start."""
        if self.here:
            rate = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
            yield (
                f"  this start     {_counted(self.here)} in {duration(self.training_s)}"
                f"{f' at {rate} tokens/s' if rate else ''}; {duration(seconds)} in all"
            )
        yield from self.figures()

    def figures(self) -> Iterator[str]:
        """Yields the lines about losses."""
        if self.loss is not None:
            compared = loss_words([reading.value for reading in self.losses])
            yield f"  loss           {self.loss.value:.4f} at step {self.loss.step}; {compared}"
        if self.evaluated is not None and self.best is not None:
            newest = f"{self.evaluated.value:.4f} at step {self.evaluated.step}"
            best = f"{self.best.value:.4f} at step {self.best.step}"
            yield f"  held-out loss  {newest}; best {best}"


def loss_words(losses: Sequence[float]) -> str:
    """Returns the first and the last loss as text.

    Both are means over a fifth of the steps, at most :data:`COMPARED_STEPS`, since losses of single
    batches are noisy.
    """
    count = min(COMPARED_STEPS, max(1, len(losses) // 5))
    first, last = statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])
    steps = "first and last step" if count == 1 else f"means of the first and last {count} steps"
    return f"{first:.4f} -> {last:.4f} ({steps})"


def _of_first_set(metrics: Sequence[Metrics]) -> list[Metrics]:
    """Returns the lines of the set that was evaluated first, in the order of steps."""
    lines = [line for line in metrics if line["phase"] == "eval"]
    return _by_step([line for line in lines if line.get("set") == lines[0].get("set")], "eval")


def _by_step(metrics: Sequence[Metrics], phase: str) -> list[Metrics]:
    """Returns the lines of a phase in the order of steps. The newest line of a repeated step
    counts.
    """
    lines: dict[int, Metrics] = {}
    for line in metrics:
        if line["phase"] == phase:
            lines[line["step"]] = line
    return [lines[step] for step in sorted(lines)]


def _readings(lines: Sequence[Metrics]) -> tuple[Reading, ...]:
    return tuple(
        Reading(step=line["step"], value=value)
        for line in lines
        for value in numbers([line.get("loss")])
    )


def _counted(steps: int) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'}"
