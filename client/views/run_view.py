"""A snapshot of a run for displays, from the scheduler's status and the run directory.

Also lists the saved states of a run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.evaluation import EVAL
from penstock.config.schema import Config
from penstock.daemons.scheduler.machine.evaluations import Score, Scores
from penstock.host.errors import PenstockError, StateError, reason
from penstock.host.files import is_number, parse_json
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.security.identity import Role
from penstock.protocol.wire.control import ControlClient, is_stale

Metrics = dict[str, Any]
"""One line of metrics.jsonl."""

STATUS_TIMEOUT_S = 1.0
ABSENCE_S = 3.0
"""Seconds without an answer after which a display reports the scheduler as silent."""

PAST_BYTES = 4 << 20
"""Bytes of old metrics to read for a curve."""
PAST_PIECES = 64
"""Number of places in a longer file to read the old metrics from."""

ENDED_PHASES = frozenset(("stopping", "done", "failed"))
"""Phases after which the scheduler exits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The state of a run at one moment.

    ``status`` is None while the scheduler does not answer, for ``silent_s`` seconds so far.
    ``fresh`` holds the metrics since the previous view. The first view may hold older metrics in
    ``past``, of a long run only samples.
    """

    steps: int
    status: pb.StatusReply | None
    fresh: tuple[Metrics, ...]
    absent_phase: str = "starting"
    silent_s: float = 0.0
    past: tuple[Metrics, ...] = ()

    @property
    def phase(self) -> str:
        """The scheduler's phase, or ``absent_phase`` without an answer."""
        return self.status.phase if self.status is not None else self.absent_phase


@dataclass(slots=True)
class MetricsTail:
    """Reads complete lines that are appended to a metrics file."""

    path: Path
    offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    @classmethod
    def at_end(cls, path: Path) -> MetricsTail:
        """Returns a tail that skips the existing lines."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def before(self) -> tuple[Metrics, ...]:
        """Returns earlier lines than :meth:`read`.

        These are all lines of a file of up to :data:`PAST_BYTES`. Of a longer file, they are
        samples from the whole file, and its last lines.

        Raises:
            StateError: the file cannot be read.
        """
        piece = PAST_BYTES // PAST_PIECES
        starts = [self.offset * number // PAST_PIECES for number in range(PAST_PIECES - 1)]
        pieces = [(start, start + piece) for start in starts] + [(self.offset - piece, self.offset)]
        if self.offset <= PAST_BYTES:
            pieces = [(0, self.offset)]
        lines = [line for start, end in pieces for line in self._between(start, end)]
        return tuple(entry for line in lines if (entry := _metrics(line)) is not None)

    def _between(self, start: int, end: int) -> list[bytes]:
        """Returns the complete lines between two offsets."""
        if not self.path.exists():
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                lines = file.read(end - start).split(b"\n")
        except OSError as error:
            raise StateError(f"{self.path}: cannot read it: {reason(error)}") from error
        return lines[1 if start else 0 : -1]

    def read(self) -> tuple[Metrics, ...]:
        """Returns the lines since the last call, without lines that are no metrics.

        Raises:
            StateError: the file cannot be read.
        """
        try:
            if not self.path.exists() or self.path.stat().st_size == self.offset:
                return ()
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError as error:
            raise StateError(f"{self.path}: cannot read it: {reason(error)}") from error
        # Keeps an incomplete last line for the next call: a read may come between two writes.
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return tuple(entry for line in lines if (entry := _metrics(line)) is not None)


def _metrics(line: bytes) -> Metrics | None:
    """Returns a line of metrics, or None for a line without phase and step, such as an editor may
    leave.
    """
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    known = isinstance(entry, dict) and entry.get("phase") in ("train", "eval")
    return entry if known and type(entry.get("step")) is int else None


def numbers(values: Iterable[Any]) -> list[float]:
    """Returns the values that are finite numbers."""
    return [value for value in values if is_number(value)]


class Observer:
    """Polls a run over one connection. ``past``: True to give the first view older metrics."""

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        past: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._clock = clock
        self._tail = MetricsTail.at_end(run_dir / "metrics.jsonl")
        self._client: ControlClient | None = None
        self._phase = "starting"
        self._heard_s = clock()
        self._past = self._tail.before() if past else ()

    def look(self) -> RunView:
        """Returns the current view; waits at most :data:`STATUS_TIMEOUT_S` for the scheduler."""
        status = self._status()
        if status is not None:
            self._phase, self._heard_s = status.phase, self._clock()
        past, self._past = self._past, ()
        return RunView(
            steps=self._steps,
            status=status,
            fresh=self._tail.read(),
            absent_phase=self._absent_phase(),
            silent_s=self._clock() - self._heard_s,
            past=past,
        )

    def _absent_phase(self) -> str:
        """Returns the phase to show while the scheduler does not answer.

        The scheduler may not have started. It may have ended, after which its node removes the
        endpoint. Or it is silent, briefly or for longer.
        """
        if self._phase == "starting":
            return self._phase
        if self._phase in ENDED_PHASES or not (self._run_dir / "endpoint.json").exists():
            return "ending"
        away_s = self._clock() - self._heard_s
        if away_s < ABSENCE_S:
            return self._phase
        return "ending" if is_stale(self._run_dir) else "no_answer"

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
            # Not started, being replaced, or gone: the next poll connects again.
            self.close()
            return None


def all_metrics(run_dir: Path) -> tuple[Metrics, ...]:
    """Returns all complete lines of a run's metrics."""
    return MetricsTail(run_dir / "metrics.jsonl").read()


_PREFIX = "step-"


def early_end_of(config: Config, lines: Iterable[Mapping[str, Any]], step: int) -> str:
    """Returns why ``train.stop_early`` ended a run at ``step``; empty if it did not. ``lines``: all
    lines of evaluations. The scheduler decides by the journal's copy of them.
    """
    scores = Scores()
    for line in lines:
        if line.get("phase") == "eval" and line["step"] <= step:
            share = line.get("pair_accuracy", line.get("token_accuracy"))
            loss, accuracy = (next(iter(numbers([v])), None) for v in (line.get("loss"), share))
            name = str(line.get("set", EVAL))
            score = Score(set_name=name, version=line["step"], loss=loss, accuracy=accuracy)
            scores.add(score)
    return scores.early_end(config, config.stop_judge, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolder:
    """A complete saved state: ``path`` holds the state after ``version`` steps."""

    version: int
    path: Path


def saved_states(run_dir: Path) -> list[StateFolder]:
    """Returns all saved states, oldest first, without a save in progress, which has another
    name.
    """
    states = [
        StateFolder(version=int(path.name.removeprefix(_PREFIX)), path=path)
        for path in (run_dir / "state").glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return sorted(states, key=lambda state: state.version)
