"""What happened to a run, told from the logs of its scheduler and its nodes.

Logs are of people's language already; here their lines are sorted by what they mean, and put into
recoveries: what broke a membership, and how long it took until training went on. Lines of no known
meaning stay as they are where they are warnings or errors. Only the last
:data:`MAX_LOG_BYTES` of a log are read.
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
    """What a line is about."""

    START = "start"
    FAULT = "fault"
    RECOVERY = "recovery"
    RESTORE = "restore"
    SAVE = "save"
    WARNING = "warning"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that happened, in seconds since the epoch of Unix."""

    time_s: float
    process: str
    kind: IncidentKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The way from a fault to the next membership, ``epoch``. ``step``: where training went on."""

    time_s: float
    cause: str
    seconds: float
    epoch: int
    step: int


@dataclass(frozen=True, kw_only=True)
class History:
    """Incidents in the order of time. ``cut``: some logs were longer than what was read.

    ``first_s``, ``last_s``: when the first and the last line of all logs was written; None without
    logs.
    """

    incidents: tuple[Incident, ...]
    recoveries: tuple[Recovery, ...]
    first_s: float | None
    last_s: float | None
    cut: bool

    def count(self, kind: IncidentKind) -> int:
        """Returns how often something of a kind happened."""
        return sum(incident.kind is kind for incident in self.incidents)

    @property
    def end(self) -> str | None:
        """Why the run ended; None while it has not, as far as the logs say."""
        ends = [i for i in self.incidents if i.kind in (IncidentKind.END, IncidentKind.START)]
        return ends[-1].text if ends and ends[-1].kind is IncidentKind.END else None


@dataclass(frozen=True, slots=True)
class _Meaning:
    """Lines that match ``pattern`` are of ``kind``, and are told with ``words``."""

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
"""What belongs to starts, ends and faults that other lines tell."""


def read_history(run_dir: Path) -> History:
    """Reads the logs of a run. Without logs, or where they cannot be read, nothing happened."""
    entries: list[dict[str, Any]] = []
    cut = False
    for path in sorted((run_dir / "logs").glob("*.jsonl")):
        found, shortened = _entries(path)
        entries += found
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
    """Returns the lines of a log's end, and whether there is more before them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return [], False
    found = []
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:
            continue  # half of a line, at either end
        if isinstance(entry, dict) and is_number(entry.get("time")):
            found.append(entry)
    return found, size > MAX_LOG_BYTES


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
    """Yields a recovery for each membership but the first; incidents since the membership before
    are the cause.
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
