"""Writes docs/STATES.md: the scheduler's states, with a diagram and a table for each kind."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

from penstock.daemons.scheduler.machine.states import (
    DERIVED_EVENTS,
    TABLES,
    AttemptState,
    EpochState,
    MemberState,
    SaveState,
    Transition,
)

WIDTH = 100
_TITLES: Mapping[type[StrEnum], str] = MappingProxyType(
    {
        MemberState: "Members",
        EpochState: "The membership epoch",
        AttemptState: "Attempts",
        SaveState: "Saves",
    }
)
_HEAD = """# States of the scheduler

`make docs` writes this page from `daemons/scheduler/machine/states.py`; `tests/scheduler` compares
the table with the machine.

Events in `code` are classes of `daemons/scheduler/machine/events.py`, or members' messages of
`protocol/scheduler.proto`. *Epoch begins*, *epoch breaks*, *run ends* and *is due* are consequences
of the other tables. *Any event* occurs in a stopped run: each event may bring the deadline of the
stop.

Effects of an event are carried out in order, and a journal row is durable before the next effect. A
status shows more in a live epoch: running, deciding, amending, mirroring, settling, saving,
evaluating or paused.
"""


def markdown() -> str:
    """Returns the page."""
    return _HEAD + "".join(_section(kind, rows) for kind, rows in TABLES.items())


def _section(kind: type[StrEnum], rows: tuple[Transition, ...]) -> str:
    meanings = "".join(_bullet(f"* *{state}*: {text}") for state, text in meanings_of(kind).items())
    diagram = "".join(f"    {edge}\n" for edge in _edges(rows))
    table = "".join(
        f"| {', '.join(row.states) or '(none)'} | {_events(row)} | {row.next} | {row.effect} |\n"
        for row in rows
    )
    return (
        f"\n## {_TITLES[kind]}\n\n{meanings}\n```mermaid\nstateDiagram-v2\n{diagram}```\n\n"
        f"| state | event | next state | reason and effects |\n|---|---|---|---|\n{table}"
    )


def _bullet(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _events(row: Transition) -> str:
    return ", ".join(
        f"*{event}*" if event in DERIVED_EVENTS else f"`{event}`" for event in row.events
    )


def _edges(rows: tuple[Transition, ...]) -> Iterator[str]:
    """Yields one edge for each pair of states, with the events of all rows between them."""
    events: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for state in row.states or ("[*]",):
            edge = events.setdefault((state, row.next), [])
            edge += [event for event in row.events if event not in edge]
    for (state, following), names in events.items():
        yield f"{state} --> {following}: {', '.join(names)}"


def meanings_of(kind: type[StrEnum]) -> dict[StrEnum, str]:
    """Returns the docstring below each state of a kind."""
    lines = inspect.getsource(kind).splitlines()
    meanings: dict[StrEnum, str] = {}
    for assignment, text in pairwise(lines):
        name = assignment.strip().partition(" = ")[0]
        if name in kind.__members__:
            meanings[kind[name]] = text.strip().strip('"')
    return meanings


if __name__ == "__main__":
    sys.stdout.write(markdown())
