"""The table of faults, what became of them, and how long that took."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from penstock.chaos.faulted_run import Aftermath
from penstock.chaos.faults import FaultKind, Moment

_BY_TARGET = (FaultKind.KILL, FaultKind.PAUSE, FaultKind.STOP)
"""Kinds that mean something else for each kind of process."""

_HEADINGS = {
    Aftermath.RECOVERED: "recovered",
    Aftermath.WENT_BACK: "went back",
    Aftermath.UNHARMED: "went on",
    Aftermath.CONTINUED: "same command",
    Aftermath.REFUSED: "refused",
    Aftermath.ENDED: "ended",
}

Entry = Mapping[str, Any]
"""A fault as :meth:`penstock.chaos.faulted_run.Suffered.to_dict` writes it."""


def row_of(entry: Entry) -> str:
    """Returns the words under which a fault is counted."""
    kind = FaultKind(entry["kind"])
    words = f"{kind} {entry['targets'][0]}" if kind in _BY_TARGET else str(kind)
    return f"{words}, {Moment.START}" if entry["moment"] == Moment.START else words


def rows_of(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Returns the faults by row, in the order of kinds."""
    rows: dict[str, list[Entry]] = {}
    order = list(FaultKind)
    for entry in sorted(entries, key=lambda e: (order.index(FaultKind(e["kind"])), row_of(e))):
        rows.setdefault(row_of(entry), []).append(entry)
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def table_of(title: str, entries: Iterable[Entry]) -> Table:
    """Returns a table for a terminal; times are in seconds, and leave out faults behind the last
    step.
    """
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("fault", no_wrap=True)
    for heading in ("count", *_HEADINGS.values(), "median s", "p99 s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for words, found in rows_of(entries).items():
        counts = [sum(e["outcome"] == outcome for e in found) for outcome in _HEADINGS]
        times = [float(e["seconds"]) for e in found if e["outcome"] != Aftermath.ENDED]
        measured = (statistics.median(times), percentile(times, 0.99)) if times else ()
        table.add_row(
            words,
            str(len(found)),
            *(str(count or "") for count in counts),
            *(f"{seconds:.2f}" for seconds in measured),
        )
    return table


def tables_of(entries: Sequence[Entry]) -> list[Table]:
    """Returns the table of faults that are seen at once, and of those seen after a deadline."""
    parts = (
        ("faults that are seen at once", [e for e in entries if not e["timeout"]]),
        ("faults that are seen by their silence", [e for e in entries if e["timeout"]]),
    )
    return [table_of(title, found) for title, found in parts if found]
