"""The saved states of a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A complete saved state: ``path`` holds the state after ``version`` steps."""

    version: int
    path: Path


def saved_states(run_dir: Path) -> list[SavedState]:
    """All of them, oldest first. What is being written has another name and does not count."""
    found = [
        SavedState(version=int(path.name.removeprefix(_PREFIX)), path=path)
        for path in (run_dir / "state").glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(found, key=lambda state: state.version)
