"""What was found: a JSON file for each part, whole after every measurement.

    {"part": "copies", "device": "cuda", "tiny": false, "gpu": "NVIDIA H200",
     "measurements": {"alone": {"status": "done", "seconds": 4.1, "at": "2026-…", "figures": {…},
                                "gpu": "NVIDIA H200", "commit": "e6b6888", "others": [{…}]}}}

``status``: ``done``; ``late``, the deadline came (``figures`` are those found before it);
``failed``, with ``error`` and the end of its ``log``; ``skipped``, with the reason as ``error``.
``others``: the same measurement earlier, or on another card.
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


CARD = "H200"
"""Card whose measurements come first; those of other cards stand beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one measurement. ``at``: its time, as ISO 8601; ``log``: the end of its output;
    ``gpu``: the card's name; ``commit``: the measured sources, empty where unknown; ``others``:
    outcomes of the same measurement with figures, in the order of :func:`merged`.
    """

    status: Status
    seconds: float = 0.0
    at: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    log: str = ""
    gpu: str | None = None
    commit: str = ""
    others: tuple[Outcome, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], gpu: str | None) -> Outcome:
        """Returns the outcome that a file has; ``gpu``: the card of an outcome that names none.

        Raises:
            KeyError, TypeError, ValueError: ``fields`` are of another form.
        """
        others = tuple(cls.from_json(other, gpu) for other in fields.get("others", ()))
        card = fields.get("gpu") or gpu
        status = Status(fields["status"])
        return cls(**{**fields, "status": status, "gpu": card, "others": others})

    def without_logs(self) -> Outcome:
        """Returns the outcome without its output, which is of one machine."""
        others = tuple(other.without_logs() for other in self.others)
        return replace(self, log="", others=others)


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
        outcomes = {name: one.without_logs() for name, one in self.measurements.items()}
        return replace(self, measurements=outcomes)

    def write(self, folder: Path) -> None:
        """Writes PART.json, in one go: a kill leaves the old one."""
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
            gpu = found.get("gpu")
            outcomes = {
                name: Outcome.from_json(one, gpu) for name, one in found.pop("measurements").items()
            }
            return cls(**found, measurements=outcomes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of results: {error!r}") from error


_WORTH = {Status.SKIPPED: 0, Status.FAILED: 1, Status.LATE: 2, Status.DONE: 3}


def merged(results: Iterable[PartResults]) -> dict[str, PartResults]:
    """Returns the results of each part, of several tries. The outcome of a measurement is the try
    that got furthest, then the one on a :data:`CARD`, then the newest; the other tries that have
    figures are its ``others``. Parts measured on several GPUs name all of them.
    """
    parts: dict[str, PartResults] = {}
    for one in results:
        into = parts.setdefault(
            one.part, PartResults(part=one.part, device=one.device, tiny=one.tiny, gpu=one.gpu)
        )
        gpus = dict.fromkeys([*(into.gpu or "").split(", "), *(one.gpu or "").split(", ")])
        into.gpu = ", ".join(filter(None, gpus)) or None
        for name, outcome in one.measurements.items():
            into.measurements[name] = _with_others([into.measurements.get(name), outcome])
    return parts


def _with_others(tries: Iterable[Outcome | None]) -> Outcome:
    """Returns the first of all tries by rank, with the rest as its ``others``."""
    flat: dict[Any, Outcome] = {}
    for one in filter(None, tries):
        for outcome in (one, *one.others):
            flat[outcome.gpu, outcome.at, outcome.status] = replace(outcome, others=())
    first, *rest = sorted(flat.values(), key=_rank, reverse=True)
    return replace(first, others=tuple(other for other in rest if other.figures))


def _rank(outcome: Outcome) -> tuple[int, bool, str]:
    return _WORTH[outcome.status], CARD in (outcome.gpu or ""), outcome.at


def read_folders(folders: Iterable[Path]) -> dict[str, PartResults]:
    """Returns what all files of some folders have, merged.

    Raises:
        ValueError: a file is none of ours.
    """
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    return merged(PartResults.read(file) for file in files)
