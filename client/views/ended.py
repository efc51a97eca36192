"""A run that has ended, for commands: its end, its last step, and the places of its state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.client.views.display import describe
from penstock.client.views.run_view import (
    Metrics,
    StateFolder,
    all_metrics,
    early_end_of,
    saved_states,
)
from penstock.client.views.summary import Summary
from penstock.daemons.node.run_lock import kept_words
from penstock.host.errors import ConfigError, ExitCode
from penstock.protocol.run.run_result import RunEnd, end_path
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.control import is_stale

_POLL_S = 0.1
_END_WAIT_S = 20.0
"""Seconds to wait for the end of the processes of a run that has saved its last step."""
STARTING, ENDING = "is starting", "is ending"
"""States of a run that a training holds while its scheduler has no address."""


def transition_of(run_dir: Path | None) -> str | None:
    """Returns :data:`STARTING` before the scheduler of a start has an address, :data:`ENDING`
    afterwards; None for a run with an address or without a training.
    """
    if run_dir is None or not run_dir.is_dir():
        return None
    endpoint = run_dir / "endpoint.json"
    if (endpoint.exists() and not is_stale(run_dir)) or not RunDirectory(run_dir).is_held:
        return None
    begun_ns = max((_changed_ns(lock) for lock in run_dir.glob(".lock*")), default=0)
    files = (end_path(run_dir), run_dir / "metrics.jsonl")
    return ENDING if any(_changed_ns(path) > begun_ns for path in files) else STARTING


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def await_start(run_dir: Path | None, say: Callable[[str], None]) -> None:
    """Waits while the run is starting. ``say`` gets the line about the wait once."""
    if transition_of(run_dir) == STARTING:
        say(f"{run_dir}: {STARTING}")
    while transition_of(run_dir) == STARTING:
        time.sleep(_POLL_S)


def summary_of(run_dir: Path | None) -> list[str]:
    """Returns the lines about the end of a watched run, once its processes have ended; none of a
    run on another machine.
    """
    deadline_s = time.monotonic() + _END_WAIT_S
    while run_dir is not None and (run_dir / "run.json").is_file():
        ended = EndedRun.find(run_dir)
        if ended is not None:
            return ended.to_lines()
        if time.monotonic() >= deadline_s:
            break
        time.sleep(_POLL_S)
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run that has trained and has no process now.

    ``end`` is the record of its end, which ``penstock train`` removes. ``last`` is the last line of
    training metrics, ``saved`` the newest saved state. ``kept`` describes the state in this
    machine's shared memory, or is empty. ``early_end`` is the reason of an early end, or empty.
    """

    directory: RunDirectory
    end: RunEnd | None
    last: Metrics | None
    saved: StateFolder | None
    kept: str
    early_end: str = ""

    @classmethod
    def find(cls, run_dir: Path | None) -> EndedRun | None:
        """Returns the run in ``run_dir``, or None if it is active or was never started.

        Raises:
            PenstockError: the directory cannot be read.
        """
        if run_dir is None or not (run_dir / "run.json").is_file():
            return None
        directory = RunDirectory(run_dir.absolute())
        active = (run_dir / "endpoint.json").exists() and not is_stale(run_dir)
        if active or directory.is_held or not directory.has_started:
            return None
        directory.check_shape()
        metrics = all_metrics(run_dir)
        trained = [entry for entry in metrics if entry["phase"] == "train"]
        last_step = trained[-1]["step"] if trained else 0
        saved = saved_states(directory.path)
        newest = saved[-1] if saved else None
        return cls(
            directory=directory,
            end=RunEnd.read(run_dir),
            last=trained[-1] if trained else None,
            saved=newest,
            kept=kept_words(directory, newest.version if newest else 0),
            early_end=early_end_of(directory.config, metrics, last_step),
        )

    @property
    def saved_version(self) -> int:
        """The newest saved step, or 0."""
        return self.saved.version if self.saved else 0

    @property
    def step(self) -> int:
        """The last step in the metrics or the saved states."""
        return max(self.saved_version, self.last["step"] if self.last else 0)

    @property
    def phase(self) -> str:
        """``done``; ``failed`` if the record of the end says so; or ``stopped``."""
        if self.saved_version >= self.directory.config.train.steps:
            return "done"
        if self.early_end and self.saved_version >= self.step:
            return "done"
        return "failed" if self.end is not None and self.end.failed else "stopped"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of ``penstock watch``."""
        codes = {"done": ExitCode.DONE, "failed": ExitCode.LOST_MEMBERS}
        return codes.get(self.phase, ExitCode.STOPPED)

    @property
    def headline(self) -> str:
        """The end in one line."""
        config = self.directory.config
        saved = f"step {self.saved_version}" if self.saved else "nothing"
        why = f" ({self.end.reason})" if self.phase == "failed" and self.end else ""
        if self.phase == "done" and self.early_end:
            why = f" ({self.early_end})"
        return (
            f"{config.run.name} ({self.directory.run_id}): has ended, {self.phase}{why} at step"
            f" {self.step}/{config.train.steps}; saved: {saved}"
        )

    def to_lines(self) -> list[str]:
        """Returns the lines that ``status`` and ``watch`` print."""
        path = self.directory.path
        lines = [self.headline]
        lines += [describe(self.last, None)] if self.last else []
        lines += Summary.of(all_metrics(path), 0).figures()
        lines += [f"in memory    {self.kept}"] if self.kept else []
        if self.saved is not None:
            lines.append(f"saved state  {self.saved.path}")
            if not self.directory.config.cluster.platform.builtin_model:  # no model to export
                lines.append(f"export       penstock export {path} --format hf OUT")
        return [*lines, f"report       penstock report {path}"]

    def to_text(self, *, as_json: bool) -> str:
        """Returns the text of ``status``: lines, or JSON with the keys of an active run's
        status.
        """
        if not as_json:
            return "\n".join(self.to_lines())
        fields: dict[str, Any] = {
            "run_name": self.directory.config.run.name,
            "run_id": self.directory.run_id,
            "phase": self.phase,
            "ended": True,
            "version": self.step,
            "steps": self.directory.config.train.steps,
            "has_saved": self.saved is not None,
            "saved_version": self.saved_version,
            "saved_state": str(self.saved.path) if self.saved else None,
            "message": self.kept,
            "members": [],
            "last_metrics": self.last,
            "metrics": {},
        }
        return json.dumps(fields, indent=1)

    def answer(self, call: str) -> str:
        """Returns the answer to a control command. ``stop`` succeeds, since the run has stopped.

        Raises:
            ConfigError: the command needs an active run.
        """
        if call == "stop":
            return "\n".join(filter(None, (self.headline, self.kept)))
        raise ConfigError(f"{call}: {self.headline}; start the run first")
