"""What ``metrics.jsonl`` says, of any length.

Up to :data:`WHOLE_LINES` lines are read as they are. Of more, all are counted, evaluations are read
completely, and of the steps every so many-th is read: sums over steps are then estimates, which
:attr:`Readings.exact` tells.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from penstock.protocol.errors import StateError, reason
from penstock.protocol.run.files import parse_json

WHOLE_LINES = 40_000
"""Reading so many takes a few tenths of a second."""

_PIECE_BYTES = 16 << 20
_DECISION = re.compile(rb'"decision": "(\w+)"')
_EVALUATION = b'"phase": "eval"'

Line = Mapping[str, Any]
Point = tuple[float, float]
"""A step and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The steps of one epoch of the scheduler: between two starts, or recoveries."""

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

    def typical(self, key: str) -> float | None:
        """Returns the median over the steps that were read, None without any."""
        values = self.values(key)
        return median(values) if values else None

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """The epochs of the scheduler, as far as lines of them were read."""
        found: dict[int, Interval] = {}
        for line in self.steps:
            epoch, step = line.get("epoch"), line.get("step")
            if isinstance(epoch, int) and isinstance(step, int) and epoch not in found:
                found[epoch] = Interval(epoch=epoch, first_step=step)
        return tuple(found.values())


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value of JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_metrics(run_dir: Path) -> Readings:
    """Reads what a run has written so far; nothing before the first step. A line that a run is just
    writing, and what is no line of metrics, are left out.

    Raises:
        StateError: the file cannot be read.
    """
    path = run_dir / "metrics.jsonl"
    try:
        if not path.exists():
            return Readings(steps=(), evaluations=(), decisions={}, every=1)
        counts: Counter[str] = Counter()
        evaluations: list[Line] = []
        for piece in _pieces(path):
            counts.update(word.decode() for word in _DECISION.findall(piece))
            if _EVALUATION in piece:
                found = (line for line in piece.split(b"\n") if _EVALUATION in line)
                evaluations += _parsed(found)
        every = max(1, math.ceil(sum(counts.values()) / WHOLE_LINES))
        steps = _parsed(_chosen(_pieces(path), every))
    except OSError as error:
        raise StateError(f"{path}: cannot read it: {reason(error)}") from error
    return Readings(steps=steps, evaluations=evaluations, decisions=counts, every=every)


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields whole lines, many at a time."""
    with path.open("rb") as file:
        rest = b""
        while piece := file.read(_PIECE_BYTES):
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            yield whole + newline


def _chosen(pieces: Iterable[bytes], every: int) -> Iterator[bytes]:
    """Yields every ``every``-th line of a step, and the last."""
    number, last = 0, b""
    for piece in pieces:
        for line in piece.splitlines():
            if _EVALUATION in line:
                continue
            last = b"" if number % every == 0 else line
            if not last:
                yield line
            number += 1
    if last:
        yield last


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
