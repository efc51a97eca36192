"""Figures as rows for people; what has none is said in words below its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.results import Outcome, PartResults, Status

Figures = Mapping[str, Any]
GIB = 1 << 30
NOTHING_YET = "Not measured yet: no GPU was at hand."
_LONGEST_NOTE = 300
_LINE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """``show`` may find a key missing, or None in its place: the cell is empty then."""

    title: str
    show: Callable[[Figures], str]

    def cell(self, figures: Figures) -> str:
        """Returns its text."""
        try:
            return self.show(figures)
        except (KeyError, TypeError, ValueError):
            return ""


def number(key: str, form: str = ".3g", scale: float = 1.0) -> Callable[[Figures], str]:
    """Shows a number, multiplied by ``scale``."""
    return lambda figures: format(figures[key] * scale, form)


def text(key: str) -> Callable[[Figures], str]:
    """Shows what there is."""
    return lambda figures: "" if figures[key] is None else str(figures[key])


def table(
    first: str,
    names: Sequence[str],
    columns: Sequence[Column],
    results: PartResults | None,
) -> Iterator[str]:
    """Yields lines: a row for each name that has figures, then a note for each that has not."""
    known = {} if results is None else results.measurements
    with_figures = [name for name in names if name in known and known[name].figures]
    if not with_figures and not any(name in known for name in names):
        yield NOTHING_YET
        return
    if with_figures:
        yield f"| {first} | " + " | ".join(column.title for column in columns) + " |"
        yield "| --- " * (len(columns) + 1) + "|"
        for name in with_figures:
            cells = [column.cell(known[name].figures) for column in columns]
            yield f"| {name} | " + " | ".join(cells) + " |"
        yield ""
    for name in names:
        note = "not measured" if name not in known else note_of(known[name])
        if note:
            yield from wrapped(f"* {name}: {note}", "  ")


def note_of(outcome: Outcome) -> str:
    """Says how a measurement ended that did not end well."""
    if outcome.status is Status.DONE:
        return ""
    words = " ".join(outcome.error.split())[:_LONGEST_NOTE]
    return f"{outcome.status}: {words}" if words else str(outcome.status)


def wrapped(line: str, indent: str = "") -> Iterator[str]:
    """Yields lines that are not too long."""
    words, now = line.split(" "), ""
    for word in words:
        if now and len(now) + 1 + len(word) > _LINE:
            yield now
            now = indent + word
        else:
            now = f"{now} {word}" if now else word
    yield now
