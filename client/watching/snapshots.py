"""What a user sees of a run at one instant, gathered from the scheduler and the run directory.

The saved states of a run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from penstock.protocol.errors import PenstockError, StateError, reason
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.files import parse_json
from penstock.protocol.security.identity import Role
from penstock.protocol.wire.control import ControlClient
from penstock.shm.inventory import held_bytes

Metrics = dict[str, Any]
"""One line of metrics.jsonl."""

STATUS_TIMEOUT_S = 1.0
ABSENCE_S = 3.0
"""A scheduler that is silent for less is not worth a word."""

ENDED_PHASES = frozenset(("stopping", "done", "failed"))
"""After these phases the scheduler goes away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment.

    ``status`` is None while the scheduler does not answer. ``fresh``: metrics since the view
    before. ``shared_bytes``: bytes of the run's segments on this machine, None where that is not
    known.
    """

    steps: int
    status: pb.StatusReply | None
    fresh: tuple[Metrics, ...]
    absent_phase: str = "starting"
    shared_bytes: int | None = None

    @property
    def phase(self) -> str:
        """The scheduler's phase, or ``absent_phase`` while it does not answer."""
        return self.status.phase if self.status is not None else self.absent_phase


@dataclass(slots=True)
class MetricsTail:
    """Reads the lines appended to a metrics file; a line is read when it is complete."""

    path: Path
    offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    @classmethod
    def at_end(cls, path: Path) -> MetricsTail:
        """Returns a tail that skips what is there already."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def read(self) -> tuple[Metrics, ...]:
        """Returns the lines since the last call. What is no line of metrics is left out.

        Raises:
            StateError: the file cannot be read.
        """
        if not self.path.exists():
            return ()
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError as error:
            raise StateError(f"{self.path}: cannot read it: {reason(error)}") from error
        # A line whose end is not written yet is kept and joined with what comes: the writer appends
        # whole lines, but a reader may look in between.
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return tuple(entry for line in lines if (entry := _metrics(line)) is not None)


def _metrics(line: bytes) -> Metrics | None:
    """Returns a line of metrics: an object that says at least in which phase it was written at
    which step. Returns None for any other line, such as an editor might leave.
    """
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    known = isinstance(entry, dict) and entry.get("phase") in ("train", "eval")
    return entry if known and type(entry.get("step")) is int else None


def numbers(values: Iterable[Any]) -> list[float]:
    """Returns those values that are finite numbers."""
    kept = (v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool))
    return [value for value in kept if abs(value) < inf]


class Observer:
    """Looks at a run again and again over one connection."""

    def __init__(
        self, run_dir: Path, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._clock = clock
        self._tail = MetricsTail.at_end(run_dir / "metrics.jsonl")
        self._client: ControlClient | None = None
        self._phase = "starting"
        self._heard_s = clock()
        self._run_id: str | None = None

    def look(self) -> RunView:
        """Returns the run now; it waits at most :data:`STATUS_TIMEOUT_S` for the scheduler."""
        status = self._status()
        if status is not None:
            self._phase, self._heard_s, self._run_id = status.phase, self._clock(), status.run_id
        return RunView(
            steps=self._steps,
            status=status,
            fresh=self._tail.read(),
            absent_phase=self._absent_phase(),
            shared_bytes=None if self._run_id is None else held_bytes(self._run_id),
        )

    def _absent_phase(self) -> str:
        """Returns a name for the time in which the scheduler does not answer: it has not begun, or
        has ended (its node then removes the endpoint), or it is away, for a moment or for longer.
        """
        if self._phase == "starting":
            return self._phase
        if self._phase in ENDED_PHASES or not (self._run_dir / "endpoint.json").exists():
            return "ending"
        away_s = self._clock() - self._heard_s
        return self._phase if away_s < ABSENCE_S else "no_answer"

    def close(self) -> None:
        """Closes the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _status(self) -> pb.StatusReply | None:
        try:
            if self._client is None:
                self._client = ControlClient.for_run(self._run_dir, STATUS_TIMEOUT_S, Role.LOOK)
            return self._client.status()
        except PenstockError:
            # Not there yet, being replaced, or gone: the next look connects anew.
            self.close()
            return None


def all_metrics(run_dir: Path) -> tuple[Metrics, ...]:
    """Returns all complete lines of a run's metrics."""
    return MetricsTail(run_dir / "metrics.jsonl").read()


_PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolder:
    """A complete saved state: ``path`` holds the state after ``version`` steps."""

    version: int
    path: Path


def saved_states(run_dir: Path) -> list[StateFolder]:
    """Returns all saved states, oldest first. What is being written has another name and does not
    count.
    """
    found = [
        StateFolder(version=int(path.name.removeprefix(_PREFIX)), path=path)
        for path in (run_dir / "state").glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(found, key=lambda state: state.version)
