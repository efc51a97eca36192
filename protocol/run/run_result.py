"""``ended.json``: the result of the run, for members that come when its scheduler is gone.

The scheduler writes it before it orders any member to shut down. A node writes it when it stops
waiting for a dead scheduler. A start of the run removes it. Until then a node that lost its
scheduler learns here that the run is over. It ends its children, and frees their memory unless the
file says that the memory is still needed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.host.errors import ExitCode, ending_code
from penstock.host.files import DAMAGED, parse_json, write_atomically, writing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """``keep_memory``: shared memory has state that is not saved. ``failed``: ``reason`` is an
    error. ``written_s``: when, in seconds since the epoch; it tells notes apart.
    """

    reason: str
    code: ExitCode
    keep_memory: bool
    failed: bool
    written_s: float

    def write(self, run_dir: Path) -> None:
        """Writes the result for all members.

        Raises:
            PenstockError: the file cannot be written.
        """
        write_atomically(end_path(run_dir), json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> RunEnd | None:
        """Returns the result of the run in ``run_dir``; None without a readable one."""
        try:
            fields = parse_json(end_path(run_dir).read_bytes())
            return cls(
                reason=str(fields["reason"]),
                code=ending_code(int(fields["code"])),
                keep_memory=bool(fields["keep_memory"]),
                failed=bool(fields["failed"]),
                written_s=float(fields["written_s"]),
            )
        except (OSError, *DAMAGED):
            return None  # memory is then kept, and waiting nodes continue to wait


def end_path(run_dir: Path) -> Path:
    """Returns the path of ``ended.json``."""
    return run_dir / "ended.json"


def forget_end(run_dir: Path) -> None:
    """Removes the result of an earlier start, at the start of the run.

    Raises:
        ConfigError: a file of its name cannot be removed.
    """
    path = end_path(run_dir)
    with writing(path, 0):
        path.unlink(missing_ok=True)


class EndWatch:
    """Checks whether the run has ended since a node was started in it.

    ``old``: the result that the node found at its start, of an earlier run. It is None in a run
    that removed old results at its start.
    """

    def __init__(self, run_dir: Path, old: RunEnd | None = None) -> None:
        self.run_dir = run_dir
        self._old = old

    def look(self) -> RunEnd | None:
        """Returns the result of the run if it has ended since the start; else None."""
        end = RunEnd.read(self.run_dir)
        return None if end == self._old else end
