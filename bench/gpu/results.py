"""What was found: a JSON file for each part, whole after every measurement.

    {"part": "copies", "device": "cuda", "tiny": false, "gpu": "NVIDIA H100 80GB HBM3",
     "measurements": {"alone": {"status": "done", "seconds": 4.1, "at": "2026-…", "figures": {…}}}}

``status``: ``done``; ``late``, the deadline came (``figures`` are those found before it);
``failed``, with ``error`` and the end of its ``log``; ``skipped``, with the reason as ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

LOG_CHARACTERS = 12_000


class Status(StrEnum):
    """How a measurement ended."""

    DONE = "done"
    LATE = "late"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one measurement. ``at``: when it ended, as ISO 8601; ``log``: the end of its output."""

    status: Status
    seconds: float = 0.0
    at: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    log: str = ""


@dataclass(slots=True, kw_only=True)
class PartResults:
    """All that is known of a part. ``gpu`` is None where it ran without one."""

    part: str
    device: str
    tiny: bool
    gpu: str | None = None
    measurements: dict[str, Outcome] = field(default_factory=dict)

    def without_logs(self) -> PartResults:
        """Returns the same without what measurements printed: that is of one machine."""
        outcomes = {name: replace(one, log="") for name, one in self.measurements.items()}
        return replace(self, measurements=outcomes)

    def write(self, folder: Path) -> None:
        """Write PART.json, in one go: a kill leaves the old one."""
        path = folder / f"{self.part}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> PartResults:
        """Returns what a file has.

        Raises:
            ValueError: it is not such a file; says which.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            outcomes = {
                name: Outcome(**{**one, "status": Status(one["status"])})
                for name, one in found.pop("measurements").items()
            }
            return cls(**found, measurements=outcomes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of results: {error!r}") from error


_WORTH = {Status.SKIPPED: 0, Status.FAILED: 1, Status.LATE: 2, Status.DONE: 3}


def merged(results: Iterable[PartResults]) -> dict[str, PartResults]:
    """Returns one for each part. Of a measurement that was made several times the one that got
    furthest counts, of those the last. Parts measured on several GPUs name all of them.
    """
    found: dict[str, PartResults] = {}
    for one in results:
        into = found.setdefault(
            one.part, PartResults(part=one.part, device=one.device, tiny=one.tiny, gpu=one.gpu)
        )
        gpus = dict.fromkeys([*(into.gpu or "").split(", "), *(one.gpu or "").split(", ")])
        into.gpu = ", ".join(filter(None, gpus)) or None
        for name, outcome in one.measurements.items():
            old = into.measurements.get(name)
            if old is None or _rank(outcome) >= _rank(old):
                into.measurements[name] = outcome
    return found


def _rank(outcome: Outcome) -> tuple[int, str]:
    return _WORTH[outcome.status], outcome.at


def read_folders(folders: Iterable[Path]) -> dict[str, PartResults]:
    """Returns what all files of some folders have, merged.

    Raises:
        ValueError: a file is none of ours.
    """
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    return merged(PartResults.read(file) for file in files)
