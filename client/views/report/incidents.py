"""Incidents of a run, from the logs of its scheduler and nodes.

Known log lines become incidents of a kind. Incidents form recoveries: the cause that broke a
membership, and the time until training continued. Other warnings and errors keep their text. Only
the last :data:`MAX_LOG_BYTES` of a log are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.host.files import is_number, parse_json
from penstock.protocol.run.names import SCHEDULERD

MAX_LOG_BYTES = 2 << 20


class IncidentKind(StrEnum):
    """Kinds of incidents."""

    START = "start"
    FAULT = "fault"
    RECOVERY = "recovery"
    RESTORE = "restore"
    SAVE = "save"
    WARNING = "warning"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """An event of a run at ``time_s`` (Unix time)."""

    time_s: float
    process: str
    kind: IncidentKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A recovery from a fault to the membership ``epoch``. Training continued at ``step``."""

    time_s: float
    cause: str
    seconds: float
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class History:
    """Incidents in the order of time. ``cut``: True if only the end of a log was read.

    ``first_s`` and ``last_s`` are the Unix times of the first and the last log line, or None.
    """

    incidents: tuple[Incident, ...]
    recoveries: tuple[Recovery, ...]
    first_s: float | None
    last_s: float | None
    cut: bool

    def count(self, kind: IncidentKind) -> int:
        """Returns the number of incidents of a kind."""
        return sum(incident.kind is kind for incident in self.incidents)

    @property
    def end(self) -> str | None:
        """The reason of the end in the logs, or None."""
        ends = [i for i in self.incidents if i.kind in (IncidentKind.END, IncidentKind.START)]
        return ends[-1].text if ends and ends[-1].kind is IncidentKind.END else None


@dataclass(frozen=True, slots=True)
class _Meaning:
    """A rule: lines that match ``pattern`` become incidents of ``kind`` with the text ``words``."""

    pattern: re.Pattern[str]
    kind: IncidentKind
    words: str


_MEANINGS = tuple(
    _Meaning(re.compile(pattern), kind, words)
    for pattern, kind, words in (
        (
            r"(\S+) was killed by signal (\d+); restarting.*",
            IncidentKind.FAULT,
            r"\1 was killed by signal \2, and started again",
        ),
        (
            r"(\S+) exited with code (\d+); restarting.*",
            IncidentKind.FAULT,
            r"\1 ended with exit code \2, and was started again",
        ),
        (
            r"(?:membership|epoch) 1 begins at version 0",
            IncidentKind.START,
            "all processes are ready: step 1 begins",
        ),
        (
            r"(?:membership|epoch) (\d+) begins at version (\d+)",
            IncidentKind.RECOVERY,
            r"all processes are ready (membership \1): training goes on behind step \2",
        ),
        (r"saved step (\d+) in .*", IncidentKind.SAVE, r"step \1 is saved"),
        (r"shutting down: (.*)", IncidentKind.END, r"\1"),
        (r"restoring from (.*)", IncidentKind.RESTORE, r"memory is filled again from \1"),
    )
)
_ORDINARY = re.compile(
    r"restoring from initial weights: .*no committed version|no stream to the scheduler"
    r"|the run ends: |.* \(pid \d+\): stream ended"
)
"""Lines that belong to starts, ends and faults with a better line."""


def read_history(run_dir: Path) -> History:
    """Reads the logs of a run. Missing or unreadable logs give an empty history."""
    entries: list[dict[str, Any]] = []
    cut = False
    for path in sorted((run_dir / "logs").glob("*.jsonl")):
        lines, shortened = _entries(path)
        entries += lines
        cut = cut or shortened
    entries.sort(key=lambda entry: entry["time"])
    incidents = tuple(filter(None, map(_incident, entries)))
    return History(
        incidents=incidents,
        recoveries=tuple(_recoveries(incidents)),
        first_s=entries[0]["time"] if entries else None,
        last_s=entries[-1]["time"] if entries else None,
        cut=cut,
    )


def _entries(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Returns the last lines of a log, and whether the log has earlier lines."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return [], False
    entries = []
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            continue  # a partial line at either end
        if isinstance(entry, dict) and is_number(entry.get("time")):
            entries.append(entry)
    return entries, size > MAX_LOG_BYTES


def _incident(entry: dict[str, Any]) -> Incident | None:
    process, text = str(entry.get("process", "")), str(entry.get("message", ""))
    decides = process == SCHEDULERD or process.startswith("node.")
    loud = entry.get("level") in ("warning", "error", "critical")
    kind, words = IncidentKind.WARNING, text
    for meaning in _MEANINGS if decides else ():
        match = meaning.pattern.fullmatch(text)
        if match is not None:
            kind, words = meaning.kind, match.expand(meaning.words)
            break
    if _ORDINARY.match(text) or (kind is IncidentKind.WARNING and not loud):
        return None
    return Incident(time_s=float(entry["time"]), process=process, kind=kind, text=words)


_STEP = re.compile(r".*membership (\d+)\): .*step (\d+)")


def _recoveries(incidents: Iterable[Incident]) -> Iterator[Recovery]:
    """Yields a recovery for each membership after the first. The incidents since the previous
    membership are the cause.
    """
    broken: list[Incident] = []
    warned: list[Incident] = []
    for incident in incidents:
        match = _STEP.fullmatch(incident.text) if incident.kind is IncidentKind.RECOVERY else None
        if match is not None:
            causes = broken or warned[-1:]
            since_s = causes[0].time_s if causes else incident.time_s
            yield Recovery(
                time_s=since_s,
                cause="; ".join(dict.fromkeys(i.text for i in causes)) or "started again",
                seconds=incident.time_s - since_s,
                epoch=int(match[1]),
                step=int(match[2]),
            )
        if incident.kind in (IncidentKind.FAULT, IncidentKind.END):
            broken.append(incident)
        elif incident.kind is IncidentKind.WARNING:
            warned.append(incident)
        elif incident.kind in (IncidentKind.RECOVERY, IncidentKind.START):
            broken.clear()
            warned.clear()
