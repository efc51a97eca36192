"""Tables of faults with their outcomes and times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from penstock.chaos.faulted_run import Outcome
from penstock.chaos.faults import FaultKind, Moment

_BY_TARGET = (FaultKind.KILL, FaultKind.PAUSE, FaultKind.STOP)
"""Kinds with a row for each kind of process."""

_HEADINGS = {
    Outcome.RECOVERED: "recovered",
    Outcome.WENT_BACK: "went back",
    Outcome.UNHARMED: "went on",
    Outcome.CONTINUED: "same command",
    Outcome.REFUSED: "refused",
    Outcome.ENDED: "ended",
}

Entry = Mapping[str, Any]
"""A fault as :meth:`penstock.chaos.faulted_run.InjectedFault.to_dict` writes it."""


def row_of(entry: Entry) -> str:
    """Returns the heading of the row that counts a fault."""
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
    """Returns a table for a terminal. Times are in seconds, without faults after the last step."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("fault", no_wrap=True)
    for heading in ("count", *_HEADINGS.values(), "median s", "p99 s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading, faults in rows_of(entries).items():
        counts = [sum(e["outcome"] == outcome for e in faults) for outcome in _HEADINGS]
        times = [float(e["seconds"]) for e in faults if e["outcome"] != Outcome.ENDED]
        measured = (statistics.median(times), percentile(times, 0.99)) if times else ()
        table.add_row(
            heading,
            str(len(faults)),
            *(str(count or "") for count in counts),
            *(f"{seconds:.2f}" for seconds in measured),
        )
    return table


def tables_of(entries: Sequence[Entry]) -> list[Table]:
    """Returns a table of faults detected at once, and a table of faults detected by a timeout."""
    parts = (
        ("faults that are detected at once", [e for e in entries if not e["timeout"]]),
        ("faults that a timeout detects", [e for e in entries if e["timeout"]]),
    )
    return [table_of(title, faults) for title, faults in parts if faults]
