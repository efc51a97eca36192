"""Models and data that runs of the tests have prepared, for later runs with the same."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml


def prepared(source: Path, run_dir: Path) -> None:
    """A run directory that was never started, with the model and data of another run: preparing
    them anew takes seconds.
    """
    run_dir.mkdir()
    for name in ("model", "data"):
        shutil.copytree(source / name, run_dir / name)
    shutil.copy(source / "table.json", run_dir / "table.json")


@dataclass(frozen=True)
class Shelf:
    """Prepared models and data, for later runs with the same: preparing anew takes seconds. Of what
    does not fit after all a run sees the fingerprint, and prepares its own.
    """

    root: Path

    def take(self, config: Path, run_dir: Path) -> None:
        """Give a run that was never started what an earlier one prepared."""
        source = self._place(config)
        if source.is_dir() and not run_dir.exists():
            prepared(source, run_dir)

    def keep(self, config: Path, run_dir: Path) -> None:
        """Keep what a run has prepared, once."""
        place = self._place(config)
        if not place.exists() and (run_dir / "plan.json").exists():
            made = Path(tempfile.mkdtemp(dir=self.root)) / "new"
            prepared(run_dir, made)
            with suppress(OSError):  # another process of tests was faster
                made.rename(place)

    def _place(self, config: Path) -> Path:
        fields = yaml.safe_load(config.read_text())
        train = {k: v for k, v in fields["train"].items() if k not in ("steps", "clip_grad_norm")}
        inputs = json.dumps([fields["model"], fields["data"], train], sort_keys=True)
        return self.root / hashlib.sha256(inputs.encode()).hexdigest()
