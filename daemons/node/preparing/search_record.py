"""``RUN_DIR/search.json``: the constraints of the search that chose a run's schedule.

The record names the chosen schedule as well, so that a crash between two writes does no harm: if
``resolved.yaml`` has another schedule, the schedule is the user's own, or a start was broken off.
Runs of older versions have the constraints in ``resolved.yaml``, as ``schedule.asked``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.config.execution import ScheduleConfig
from penstock.config.reading import read_mapping
from penstock.host.errors import StateError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.planner.planning.auto import searched_keys
from penstock.protocol.run.checksums import check_object, with_checksum

FORMAT = 1
RECORD = "search.json"
_OLD_KEY = "asked"


def read_constraints(run_dir: Path, schedule: ScheduleConfig) -> Mapping[str, Any] | None:
    """Returns the constraints of the search that chose ``schedule``, that of the run until now;
    None if no search chose it.

    Raises:
        StateError: the record is damaged.
        ConfigError: ``resolved.yaml`` cannot be read.
    """
    path = run_dir / RECORD
    with suppress(FileNotFoundError):
        try:
            fields = parse_json(path.read_bytes())
            check_object(fields, str(path))
            constraints = dict(fields["constraints"])
            chosen = dict(fields["schedule"])
        except DAMAGED as error:
            raise StateError(
                f"{path}: is damaged ({error}); delete it, and schedule: auto searches again"
            ) from error
        if chosen == searched_keys(schedule):
            return constraints
    section = read_mapping(run_dir / "resolved.yaml").value.get("schedule")
    old = section.get(_OLD_KEY) if isinstance(section, dict) else None
    return old if isinstance(old, dict) else None


def write_constraints(
    run_dir: Path, schedule: ScheduleConfig, constraints: Mapping[str, Any] | None
) -> None:
    """Writes the constraints of the search that chose ``schedule``; nothing if they are None."""
    if constraints is None:
        return
    fields = {
        "format": FORMAT,
        "constraints": dict(constraints),
        "schedule": searched_keys(schedule),
    }
    text = json.dumps(with_checksum(fields), indent=1)
    if not holds_text(run_dir / RECORD, text):
        write_atomically(run_dir / RECORD, text)
