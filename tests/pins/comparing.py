"""A part of the pins: its name, the comparison with its stored outcome, and its rewriting."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MOST_LINES = 20
"""Differences of a part that are printed; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences of a part from its stored outcome. ``unpinned`` is the reason for which a part
    was not compared; empty for most. ``notes`` are harmless.
    """

    differences: Sequence[str] = ()
    unpinned: str = ""
    notes: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing differs; true of a part that was not compared."""
        return not self.differences

    def line(self, part: str) -> str:
        """Returns one line about a part, and an indented line for each difference."""
        count = len(self.differences)
        verdict = "equal" if self.holds else f"{count} {'differ' if count > 1 else 'differs'}"
        if self.unpinned:
            verdict = f"not compared; {self.unpinned}"
        lines = [f"{part}: {verdict}", *(f"  {text}" for text in self.differences[:MOST_LINES])]
        if count > MOST_LINES:
            lines.append(f"  and {count - MOST_LINES} more")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes[:MOST_LINES])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the pins. ``compare`` and ``rewrite`` take the number of seeds."""

    name: str
    compare: Callable[[int], Comparison]
    rewrite: Callable[[int], None]


def compared(stored: Mapping[str, str], current: Mapping[str, str]) -> Comparison:
    """Returns the differences of two mappings, in which an addition is a difference, too."""
    names = sorted(stored.keys() | current.keys())
    return Comparison(
        differences=[
            f"{name}: {stored.get(name, 'absent')} -> {current.get(name, 'absent')}"
            for name in names
            if stored.get(name) != current.get(name)
        ]
    )


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def shared_out(
    work: Callable[[int, Sequence[T]], dict[str, str]], items: Sequence[T]
) -> dict[str, str]:
    """Returns the outcomes of ``work`` on all items, which one process on each core shares."""
    jobs = max(1, min(usable_cores(), len(items)))
    shares = [(job, items[job::jobs]) for job in range(jobs)]
    if jobs == 1:
        return work(*shares[0])
    outcomes: dict[str, str] = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for share in pool.starmap(work, shares):
            outcomes |= share
    return outcomes


def counted(part: str, job: int, items: Sequence[T], every: int = 1) -> Iterator[T]:
    """Yields the items, and tells the progress of a job on stderr."""
    for number, item in enumerate(items):
        if number and number % every == 0:
            progress = f"{part}: job {job}, {number} of {len(items)}\n"
            (sys.__stderr__ or sys.stderr).write(progress)
        yield item


def read(path: Path) -> Any:
    """Returns the stored outcome; an empty mapping where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, content: Any) -> None:
    """Writes an outcome, with one name a line and in the order of the names."""
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
