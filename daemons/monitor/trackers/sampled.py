"""When attempts that are traced were under way, and when devices were busy in them.

The files of ``RUN_DIR/trace`` are followed as they grow. Times are moved from the clock of their
machine to seconds since 1970 by what the first line of each life of a process says.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.host.files import parse_json
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.trace import TraceEvent, TraceLane, TraceOrigin

MAX_ATTEMPTS = 256
"""So many attempts are remembered, the newest."""
MAX_READ_BYTES = 8 << 20
"""Bytes read at the end of a file's new part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """An interval in seconds since 1970. ``busy_s``: seconds spent computing in it."""

    start_s: float
    end_s: float
    busy_s: float = 0.0

    def with_(self, other: Stretch) -> Stretch:
        """Returns what covers both."""
        return Stretch(
            start_s=min(self.start_s, other.start_s),
            end_s=max(self.end_s, other.end_s),
            busy_s=self.busy_s + other.busy_s,
        )


class JsonLines:
    """Whole lines that are added to a file; one that is shorter than before is a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Any]:
        """Yields what was added since the last call; lines that are no JSON are left out."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                self._offset = 0 if size < self._offset else self._offset
                file.seek(max(self._offset, size - MAX_READ_BYTES))
                text = file.read()
                start = file.tell() - len(text)
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset = start + len(whole)
        for line in whole.splitlines():
            try:
                yield parse_json(line)
            except ValueError:
                continue


class SampledTimes:
    """Times of attempts, from the traces of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "trace"
        self._files: dict[str, JsonLines] = {}
        self._offsets_s: dict[str, float] = {}
        self._found: OrderedDict[int, dict[str, Stretch]] = OrderedDict()

    def look(self) -> None:
        """Reads what processes have added."""
        for path in sorted(self._folder.glob("*.jsonl")):
            member = path.name.removesuffix(".jsonl")
            if member != SCHEDULERD and not member.startswith("worker."):
                continue
            for values in self._files.setdefault(member, JsonLines(path)).new():
                self._take(member, values)

    def attempt(self, number: int) -> Stretch | None:
        """Returns when an attempt was under way; None where that is not traced."""
        return self._found.get(number, {}).get(SCHEDULERD)

    def devices(self, number: int) -> Mapping[str, Stretch]:
        """Returns when workers were busy in an attempt, by their names."""
        devices = self._found.get(number, {})
        return {name: stretch for name, stretch in devices.items() if name != SCHEDULERD}

    def _take(self, member: str, values: Any) -> None:
        try:
            if values[0] == "trace":
                self._offsets_s[member] = TraceOrigin.from_list(values).offset_s
                return
            event, offset_s = TraceEvent.from_list(values), self._offsets_s[member]
        except (ValueError, OverflowError, TypeError, KeyError, IndexError):
            return  # damaged, or of a life with its first line out of reach
        lane = TraceLane.SCHEDULER if member == SCHEDULERD else TraceLane.COMPUTE
        if event.lane is not lane or event.phase != "train" or event.attempt <= 0:
            return
        stretch = Stretch(start_s=event.start_s + offset_s, end_s=event.end_s + offset_s)
        busy_s = max(0.0, event.end_s - event.start_s - event.waited_s)
        devices = self._found.setdefault(event.attempt, {})
        stretch = replace(stretch, busy_s=busy_s)
        devices[member] = devices[member].with_(stretch) if member in devices else stretch
        while len(self._found) > MAX_ATTEMPTS:
            self._found.popitem(last=False)
