"""Reads ``metrics.jsonl`` of any length.

Up to :data:`WHOLE_LINES` lines are parsed completely. In a longer file, all lines are counted, all
evaluations are parsed, and only every n-th step is parsed. Sums over steps are then estimates, and
:attr:`Readings.exact` is False.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from penstock.config.evaluation import EVAL
from penstock.host.errors import StateError, reason
from penstock.host.files import is_number, parse_json

WHOLE_LINES = 40_000
"""Most lines to parse completely, which takes some tenths of a second."""

_PIECE_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 16
_DECISION = re.compile(rb'"decision": "(\w+)"')
_EVALUATION = b'"phase": "eval"'

Line = Mapping[str, Any]
Point = tuple[float, float]
"""A step and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Steps of one membership: between two starts, or recoveries."""

    epoch: int
    first_step: int


@dataclass(frozen=True, kw_only=True)
class Readings:
    """The lines of a run, in the order of the file.

    ``steps`` holds every ``every``-th line of decided attempts, and the last line. ``evaluations``
    holds all evaluations. ``decisions`` counts all attempts by decision.
    """

    steps: Sequence[Line]
    evaluations: Sequence[Line]
    decisions: Mapping[str, int]
    every: int

    @property
    def exact(self) -> bool:
        """True if every line was parsed."""
        return self.every == 1

    @property
    def attempts(self) -> int:
        """The number of decided attempts."""
        return sum(self.decisions.values())

    @property
    def step(self) -> int:
        """The newest step, or 0."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def emulated(self) -> bool:
        """True if the run is emulated: its losses are made up."""
        return any(line.get("emulated") for line in self.steps[:1])

    def points(self, key: str, *, evaluations: bool = False) -> list[Point]:
        """Returns the finite values of a key over the steps; of ``evaluations``, those of the set
        that was evaluated first.
        """
        lines = self.steps
        if evaluations:
            lines = [
                line for line in self.evaluations if set_of(line) == set_of(self.evaluations[0])
            ]
        pairs = ((line["step"], line.get(key)) for line in lines)
        return [(float(step), value) for step, value in pairs if is_number(value)]

    def of_sets(self, key: str) -> dict[str, list[Point]]:
        """Returns the finite values of a key over the steps, by evaluation set."""
        points: dict[str, list[Point]] = {}
        for line in self.evaluations:
            if is_number(value := line.get(key)):
                points.setdefault(set_of(line), []).append((float(line["step"]), value))
        return points

    def values(self, key: str) -> list[float]:
        """Returns the finite values of a key."""
        return [value for _, value in self.points(key)]

    def last(self, key: str, *, evaluations: bool = False) -> float | None:
        """Returns the newest finite value of a key, or None."""
        points = self.points(key, evaluations=evaluations)
        return points[-1][1] if points else None

    def total(self, key: str) -> float:
        """Returns the sum over all steps; an estimate unless all were parsed."""
        values = self.values(key)
        return sum(values) if self.exact else sum(values) / len(values or [1]) * self.attempts

    def median(self, key: str) -> float | None:
        """Returns the median over the parsed steps, or None."""
        values = self.values(key)
        return median(values) if values else None

    @cached_property
    def typical(self) -> Line | None:
        """The line of the typical step, with the seconds nearest to the median, or None.

        The page of a traced run takes the typical step of the trace instead.
        """
        usual_s = self.median("seconds")
        if usual_s is None:
            return None
        lines = (line for line in self.steps if is_number(line.get("seconds")))
        return min(lines, key=lambda line: abs(line["seconds"] - usual_s))

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """Memberships in the parsed lines."""
        intervals: dict[int, Interval] = {}
        for line in self.steps:
            epoch, step = line.get("epoch"), line.get("step")
            if isinstance(epoch, int) and isinstance(step, int) and epoch not in intervals:
                intervals[epoch] = Interval(epoch=epoch, first_step=step)
        return tuple(intervals.values())


def set_of(line: Line) -> str:
    """Returns the name of the evaluation set of a line. Lines of older versions have none."""
    return str(line.get("set", EVAL))


def read_metrics(run_dir: Path) -> Readings:
    """Reads the metrics of a run, without an incomplete last line and lines that are no metrics.

    Raises:
        StateError: the file cannot be read.
    """
    path = run_dir / "metrics.jsonl"
    counts: Counter[bytes] = Counter()
    steps: list[Line] = []
    evaluations: list[Line] = []
    every, first, last = 1, 0, b""
    try:
        if path.exists():
            every = _stride(path)
        for piece in _pieces(path) if path.exists() else ():
            counts.update(_DECISION.findall(piece))
            lines = piece.splitlines()
            if _EVALUATION in piece:
                evaluations += _parsed(line for line in lines if _EVALUATION in line)
                lines = [line for line in lines if _EVALUATION not in line]
            steps += _parsed(lines[first::every])
            if lines:  # the last line of all is always parsed
                last = b"" if (len(lines) - 1 - first) % every == 0 else lines[-1]
            first = (first - len(lines)) % every
    except OSError as error:
        raise StateError(f"{path}: cannot read it: {reason(error)}") from error
    steps += _parsed([last] if last else [])
    decisions = {word.decode(): count for word, count in counts.items()}
    return Readings(steps=steps, evaluations=evaluations, decisions=decisions, every=every)


def _stride(path: Path) -> int:
    """Returns n so that every n-th line is parsed, from the sizes of the file and its first
    lines.
    """
    with path.open("rb") as file:
        some = file.read(_SAMPLE_BYTES)
        size = file.seek(0, os.SEEK_END)
    length = len(some) / max(1, some.count(b"\n"))
    return max(1, math.ceil(size / max(1.0, length) / WHOLE_LINES))


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields complete lines in large pieces."""
    with path.open("rb") as file:
        rest = b""
        while piece := file.read(_PIECE_BYTES):
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            yield whole + newline


def _parsed(lines: Iterable[bytes]) -> list[Line]:
    parsed: list[Line] = []
    for text in lines:
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and is_number(line.get("step")):
            parsed.append(line)
    return parsed
