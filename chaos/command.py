"""``penstock train`` as a user gives it, again and again."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from penstock.daemons.preload.fork_request import PYTHON_MODULE


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """One command line; what its starts say goes into a file."""

    config: Path
    settings: tuple[str, ...]
    run_dir: Path
    output: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Starts it in a session of its own, so that Ctrl-C here does not reach it."""
        overrides = [word for setting in self.settings for word in ("--set", setting)]
        words = ["train", str(self.config), "--run-dir", str(self.run_dir), *overrides]
        with self.output.open("ab") as file:
            return subprocess.Popen(
                [*PYTHON_MODULE, "penstock.client.main", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        """Returns all that its starts have said."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""
