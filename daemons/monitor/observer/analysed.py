"""``critical.json``: where the step of the last analysed attempt went, for whoever shows a run.

observerd writes it; what cannot be read is as good as not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.host.files import DAMAGED, parse_json, write_atomically

_NAME = "critical.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysed:
    """Of attempt ``attempt``: seconds of its critical path by resource, and by how much the step
    would be shorter without the time of a resource.
    """

    attempt: int
    step_s: float
    critical_s: Mapping[str, float]
    savings_s: Mapping[str, float]

    def write(self, run_dir: Path) -> None:
        """Writes the file.

        Raises:
            PenstockError: it cannot be written.
        """
        write_atomically(run_dir / _NAME, json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> Analysed | None:
        """Returns what the file says; None if there is none, or it says something else."""
        try:
            found = parse_json((run_dir / _NAME).read_bytes())
            return cls(
                attempt=int(found["attempt"]),
                step_s=_seconds(found["step_s"]),
                critical_s={str(k): _seconds(v) for k, v in found["critical_s"].items()},
                savings_s={str(k): _seconds(v) for k, v in found["savings_s"].items()},
            )
        except (OSError, *DAMAGED):
            return None

    @staticmethod
    def forget(run_dir: Path) -> None:
        """Removes what an earlier start left: its plan may have been another.

        Raises:
            OSError: it cannot be removed.
        """
        (run_dir / _NAME).unlink(missing_ok=True)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{value} are no seconds")
    return seconds
