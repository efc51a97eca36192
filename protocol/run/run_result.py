"""``ended.json``: how the run ended, for members that come when its scheduler is gone.

The scheduler writes it before it tells anybody to shut down, and its node where it gives up and the
scheduler is dead. A start of the run removes it: until
then a node that lost its scheduler finds out that the run is over, ends its children, and gives
their memory back unless the note says that it is still needed.
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
        """Make it known.

        Raises:
            PenstockError: the file cannot be written.
        """
        write_atomically(end_path(run_dir), json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> RunEnd | None:
        """Returns how the run in ``run_dir`` ended; None without a note that can be read."""
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
            return None  # memory is then kept, and whoever waits goes on waiting


def end_path(run_dir: Path) -> Path:
    """Returns where the note is."""
    return run_dir / "ended.json"


def forget_end(run_dir: Path) -> None:
    """The run starts: remove the note of the time before.

    Raises:
        ConfigError: what has its name cannot be removed.
    """
    path = end_path(run_dir)
    with writing(path, 0):
        path.unlink(missing_ok=True)


class EndWatch:
    """Looks whether the run has ended since a node was started in it.

    ``old``: what the node found there and what is of an earlier start; a node of a run whose start
    removed old notes has none.
    """

    def __init__(self, run_dir: Path, old: RunEnd | None = None) -> None:
        self.run_dir = run_dir
        self._old = old

    def look(self) -> RunEnd | None:
        """Returns how the run has ended, if it has."""
        found = RunEnd.read(self.run_dir)
        return None if found == self._old else found
