"""``critical.json``: where the time of the last analysed step went, for commands that show a run.

observerd writes it; an unreadable file counts as missing.
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
    """Analysis of one attempt: seconds of its critical path by resource, and seconds that the step
    would save without a resource's time.
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
            fields = parse_json((run_dir / _NAME).read_bytes())
            return cls(
                attempt=int(fields["attempt"]),
                step_s=_seconds(fields["step_s"]),
                critical_s={str(k): _seconds(v) for k, v in fields["critical_s"].items()},
                savings_s={str(k): _seconds(v) for k, v in fields["savings_s"].items()},
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
        raise ValueError(f"{value} is not a number of seconds")
    return seconds
