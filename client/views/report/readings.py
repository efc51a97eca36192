"""What ``metrics.jsonl`` says, of any length.

Up to :data:`WHOLE_LINES` lines are read as they are. Of more, all are counted, evaluations are read
completely, and of the steps every so many-th is read: sums over steps are then estimates, which
:attr:`Readings.exact` tells.
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

from penstock.host.errors import StateError, reason
from penstock.host.files import is_number, parse_json

WHOLE_LINES = 40_000
"""Reading so many takes a few tenths of a second."""

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

    ``steps``: lines of decided attempts, or every ``every``-th of them, and the last one.
    ``evaluations``: all. ``decisions``: how many attempts were decided how; exact.
    """

    steps: Sequence[Line]
    evaluations: Sequence[Line]
    decisions: Mapping[str, int]
    every: int

    @property
    def exact(self) -> bool:
        """Whether every line was read."""
        return self.every == 1

    @property
    def attempts(self) -> int:
        """The number of decided attempts."""
        return sum(self.decisions.values())

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def emulated(self) -> bool:
        """Whether losses are made up."""
        return any(line.get("emulated") for line in self.steps[:1])

    def points(self, key: str, *, evaluations: bool = False) -> list[Point]:
        """Returns the finite values of a key over the steps."""
        lines = self.evaluations if evaluations else self.steps
        found = ((line["step"], line.get(key)) for line in lines)
        return [(float(step), value) for step, value in found if is_number(value)]

    def values(self, key: str) -> list[float]:
        """Returns the finite values of a key."""
        return [value for _, value in self.points(key)]

    def last(self, key: str, *, evaluations: bool = False) -> float | None:
        """Returns the newest finite value of a key, None without one."""
        points = self.points(key, evaluations=evaluations)
        return points[-1][1] if points else None

    def total(self, key: str) -> float:
        """Returns the sum over all steps; an estimate where not all were read."""
        values = self.values(key)
        return sum(values) if self.exact else sum(values) / len(values or [1]) * self.attempts

    def median(self, key: str) -> float | None:
        """Returns the median over the steps that were read, None without any."""
        values = self.values(key)
        return median(values) if values else None

    @cached_property
    def typical(self) -> Line | None:
        """The line of the typical step, whose seconds are nearest to the median; None without any.
        Runs with a trace have their typical step there.
        """
        usual_s = self.median("seconds")
        if usual_s is None:
            return None
        lines = (line for line in self.steps if is_number(line.get("seconds")))
        return min(lines, key=lambda line: abs(line["seconds"] - usual_s))

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """Memberships that lines were read of."""
        found: dict[int, Interval] = {}
        for line in self.steps:
            epoch, step = line.get("epoch"), line.get("step")
            if isinstance(epoch, int) and isinstance(step, int) and epoch not in found:
                found[epoch] = Interval(epoch=epoch, first_step=step)
        return tuple(found.values())


def read_metrics(run_dir: Path) -> Readings:
    """Reads what a run has written so far; nothing before the first step. A line that a run is just
    writing, and what is no line of metrics, are left out.

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
            if lines:  # the last one of all is read, whichever it is
                last = b"" if (len(lines) - 1 - first) % every == 0 else lines[-1]
            first = (first - len(lines)) % every
    except OSError as error:
        raise StateError(f"{path}: cannot read it: {reason(error)}") from error
    steps += _parsed([last] if last else [])
    decisions = {word.decode(): count for word, count in counts.items()}
    return Readings(steps=steps, evaluations=evaluations, decisions=decisions, every=every)


def _stride(path: Path) -> int:
    """Returns of how many lines one is read, by the size of the file and of its first lines."""
    with path.open("rb") as file:
        some = file.read(_SAMPLE_BYTES)
        size = file.seek(0, os.SEEK_END)
    length = len(some) / max(1, some.count(b"\n"))
    return max(1, math.ceil(size / max(1.0, length) / WHOLE_LINES))


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields whole lines, many at a time."""
    with path.open("rb") as file:
        rest = b""
        while piece := file.read(_PIECE_BYTES):
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            yield whole + newline


def _parsed(lines: Iterable[bytes]) -> list[Line]:
    found: list[Line] = []
    for text in lines:
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and is_number(line.get("step")):
            found.append(line)
    return found
