"""``RUN_DIR/metrics.jsonl``: appended by the scheduler, repaired from the journal on start.

The journal has every line first. So where a line cannot be written, for a full disk say, the run
goes on: as soon as lines can be written again, those that are missing are taken from the journal.

The lines of ``metrics.jsonl``: one object per decided attempt and per evaluation.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.daemons.scheduler.journal import Journal
from penstock.protocol.errors import StateError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.files import append_whole, cannot_write, is_no_room, writing
from penstock.shm.control import CommitRecord

_TAIL_BYTES = 2**16
_LINE_BYTES = 4096
_log = logging.getLogger(__name__)


class MetricsFile:
    """The open file. It holds whole lines only, whatever the disk does: see
    :func:`penstock.protocol.run.files.append_whole`.
    """

    def __init__(self, path: Path, journal: Journal) -> None:
        """Open or create; a full disk is no error.

        Raises:
            StateError: there is something else than a file.
            ConfigError: it cannot be written for another reason than a full disk.
        """
        if path.exists() and not path.is_file():
            raise StateError(f"{path}: is no file; move away what is there")
        self._path = path
        self._journal = journal
        self._last = ""
        self._behind = False
        self._descriptor = -1
        try:
            self._open()
        except OSError as error:
            if not is_no_room(error):
                raise cannot_write(path, error, _LINE_BYTES) from error

    def reconcile(self) -> None:
        """Cut off a line that a kill left half written; append what the journal has beyond it.

        Raises:
            ConfigError: the file cannot be read or cut off.
        """
        with writing(self._path, _LINE_BYTES):
            self._last = self._repair_tail() if self._path.exists() else ""
        missing = self._journal.lines_after(self._last)
        if missing is None:
            _log.warning("%s ends with a line the journal does not know: left as is", self._path)
        else:
            self._write(missing)

    def append(self, line: str) -> None:
        """Add one line, which is journaled; where lines before it are missing, those first."""
        missing = self._journal.lines_after(self._last) if self._behind else None
        lines = missing or [line]
        was_behind = self._behind
        self._write(lines)
        if was_behind and not self._behind:
            _log.warning("%s: complete again, %d lines came late", self._path, len(lines))

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, lines: list[str]) -> None:
        """Append lines; the first time that this fails is logged."""
        try:
            for line in lines:
                append_whole(self._open(), line.encode() + b"\n")
                self._last = line
        except OSError as error:
            if not self._behind:
                said = cannot_write(self._path, error, _LINE_BYTES)
                _log.warning("%s; lines are kept in the journal meanwhile", said)
            self._behind = True
        else:
            self._behind = False

    def _open(self) -> int:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
        return self._descriptor

    def _repair_tail(self) -> str:
        """The last complete line; what follows it is cut off."""
        with self._path.open("r+b") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            tail = file.read()
            if b"\n" not in tail:  # no metrics end like this
                start = file.seek(0)
                tail = file.read()
            end = tail.rfind(b"\n") + 1
            file.truncate(start + end)
        lines = tail[:end].splitlines()
        return lines[-1].decode(errors="replace") if lines else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """Clock readings of one attempt: start, end of the last compute instruction, decision."""

    started_s: float
    computed_s: float
    decided_s: float


def attempt_line(
    *,
    record: CommitRecord,
    reports: Iterable[pb.AttemptDone],
    grad_norm: float,
    learning_rate: float,
    loss_scale: float,
    epoch: int,
    times: AttemptTimes,
    emulated: bool = False,
) -> str:
    """The line of a decided attempt. ``grad_norm`` is the unclipped norm of unscaled gradients.

    ``emulated``: devices were; the line says so, because loss and norm are made up.

    ``bubble_ratio`` is the share of the workers' time, from the first instruction to the last of
    the slowest, in which they computed nothing. ``peak_device_bytes`` is that of the device that
    held most, left out where none was measured. ``optimizer_tail_seconds`` runs from the end of the
    last compute instruction of any worker, when the last gradient is there, to the decision: copies
    to the host, sweeps, messages, amends. Values that are no finite number become null.
    """
    done = list(reports)
    tokens = sum(report.loss_tokens for report in done)
    seconds = times.decided_s - times.started_s
    wall = max((report.wall_seconds for report in done), default=0.0)
    busy = sum(report.busy_seconds for report in done)
    peak_bytes = max((report.peak_device_bytes for report in done), default=0)
    return _line(
        step=record.version,
        attempt=record.attempt,
        phase="train",
        loss=_mean_loss(done, tokens),
        grad_norm=grad_norm,
        lr=learning_rate,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        decision=record.decision.name.lower(),
        loss_scale=loss_scale,
        epoch=epoch,
        bubble_ratio=max(0.0, 1.0 - busy / (len(done) * wall)) if wall > 0 else 0.0,
        optimizer_tail_seconds=max(0.0, times.decided_s - times.computed_s),
        **({"peak_device_bytes": peak_bytes} if peak_bytes else {}),
        **_mark(emulated),
    )


def evaluation_line(
    *,
    version: int,
    attempt: int,
    reports: Iterable[pb.EvaluationDone],
    epoch: int,
    seconds: float,
    emulated: bool = False,
) -> str:
    """The line of an evaluation: loss and perplexity on held-out data at ``version``."""
    done = list(reports)
    tokens = sum(report.loss_tokens for report in done)
    loss = _mean_loss(done, tokens)
    return _line(
        step=version,
        attempt=attempt,
        phase="eval",
        loss=loss,
        perplexity=math.exp(loss) if loss is not None and loss < 700 else None,
        grad_norm=None,
        lr=None,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        decision=None,
        loss_scale=None,
        epoch=epoch,
        bubble_ratio=None,
        optimizer_tail_seconds=None,
        **_mark(emulated),
    )


def _mark(emulated: bool) -> dict[str, bool]:
    return {"emulated": True} if emulated else {}


def _mean_loss(reports: Iterable[pb.AttemptDone | pb.EvaluationDone], tokens: int) -> float | None:
    # fsum: the same value in whatever order the workers reported.
    total = _fsum(report.loss_sum for report in reports)
    return total / tokens if tokens and math.isfinite(total) else None


def _fsum(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan


def _line(**fields: Any) -> str:
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }
    return json.dumps(clean, allow_nan=False)
