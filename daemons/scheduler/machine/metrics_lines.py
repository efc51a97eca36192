"""The lines of ``metrics.jsonl``: one JSON object for each decided attempt and each evaluation.

A line is made once, from what members reported, and journaled with its decision; so the file can
always be completed from the journal (:mod:`penstock.daemons.scheduler.metrics_file`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.shm.control import CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """Clock readings of one attempt: start, end of the last compute instruction, decision;
    ``since_1970_s`` is what the clock lacks to seconds since 1970.
    """

    started_s: float
    computed_s: float
    decided_s: float
    since_1970_s: float = 0.0


def attempt_line(
    *,
    record: CommitRecord,
    reports: Iterable[pb.AttemptDone],
    grad_norm: float,
    learning_rate: float,
    loss_scale: float,
    epoch: int,
    times: AttemptTimes,
    data_epoch: float | None = None,
    held: bool = False,
    emulated: bool = False,
) -> str:
    """Returns the line of a decided attempt. ``grad_norm`` is the unclipped norm of unscaled
    gradients.

    ``data_epoch``: passes over the training data with this attempt's samples, those of skipped
    attempts included; left out where data are made up. ``epoch`` is the scheduler's membership.

    ``held``: the optimizer waited for the norm; the line says so only then.

    ``emulated``: devices were; the line says so, because loss and norm are made up.

    ``bubble_ratio`` is the share of the workers' time, from the first instruction to the last of
    the slowest, in which they computed nothing. ``peak_device_bytes`` is that of the device that
    held most, left out where none was measured. ``optimizer_tail_seconds`` is the time from the
    last compute instruction of any worker to the decision. It contains copies to the host, sweeps,
    messages and amends. ``time`` is when it was decided, in seconds since 1970. Values that are no
    finite number become null.
    """
    done = list(reports)
    tokens, pairs = sum(report.loss_tokens for report in done), _Pairs.of(done)
    seconds = times.decided_s - times.started_s
    wall = max((report.wall_seconds for report in done), default=0.0)
    busy = sum(report.busy_seconds for report in done)
    peak_bytes = max((report.peak_device_bytes for report in done), default=0)
    return _line(
        step=record.version,
        attempt=record.attempt,
        phase="train",
        loss=_mean_loss(done, pairs.counted or tokens),
        **pairs.means(),
        grad_norm=grad_norm,
        lr=learning_rate,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else None,
        decision=record.decision.name.lower(),
        loss_scale=loss_scale,
        epoch=epoch,
        **({} if data_epoch is None else {"data_epoch": data_epoch}),
        bubble_ratio=max(0.0, 1.0 - busy / (len(done) * wall)) if wall > 0 else 0.0,
        optimizer_tail_seconds=max(0.0, times.decided_s - times.computed_s),
        time=round(times.decided_s + times.since_1970_s, 3),
        **({"peak_device_bytes": peak_bytes} if peak_bytes else {}),
        **({"held": True} if held else {}),
        **_mark(emulated),
    )


def score_of(
    set_name: str, version: int, reports: Sequence[pb.EvaluationDone], emulated: bool
) -> Score:
    """Returns the means of an evaluation. Emulated devices predict no tokens."""
    tokens, pairs = sum(report.loss_tokens for report in reports), _Pairs.of(reports)
    right = sum(report.right_tokens for report in reports)
    accuracy = right / tokens if tokens and not emulated else None
    return Score(
        set_name=set_name,
        version=version,
        loss=_mean_loss(reports, pairs.counted or tokens),
        accuracy=pairs.accuracy if pairs.counted else accuracy,
    )


def evaluation_line(
    score: Score,
    reports: Sequence[pb.EvaluationDone] = (),
    *,
    attempt: int,
    tokens: int,
    epoch: int,
    seconds: float,
    time_s: float,
    emulated: bool = False,
) -> str:
    """Returns the line of an evaluation: means over ``tokens`` counted tokens of a set, or over the
    pairs of ``reports``, done at ``time_s`` since 1970.
    """
    means: dict[str, Any] = _Pairs.of(reports).means()
    if not means:
        means = {"perplexity": score.perplexity, "token_accuracy": score.accuracy}
    return _line(
        step=score.version,
        attempt=attempt,
        phase="eval",
        set=score.set_name,
        loss=score.loss,
        **means,
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
        time=round(time_s, 3),
        **_mark(emulated),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Sums over pairs of answers of all reports."""

    counted: int
    right: int
    margin_sum: float

    @classmethod
    def of(cls, reports: Iterable[pb.AttemptDone | pb.EvaluationDone]) -> _Pairs:
        """Returns the sums of reports; all are 0 without pairs."""
        parts = [report.pairs for report in reports]
        return cls(
            counted=sum(part.counted for part in parts),
            right=sum(part.right for part in parts),
            margin_sum=_fsum(part.margin_sum for part in parts),
        )

    @property
    def accuracy(self) -> float:
        """The share of pairs with a margin above 0."""
        return self.right / self.counted

    def means(self) -> dict[str, Any]:
        """Returns the fields of a line; none without pairs."""
        if not self.counted:
            return {}
        return {
            "pairs": self.counted,
            "pair_accuracy": self.accuracy,
            "margin": self.margin_sum / self.counted,
        }


def _mark(emulated: bool) -> dict[str, bool]:
    return {"emulated": True} if emulated else {}


def _mean_loss(reports: Iterable[pb.AttemptDone | pb.EvaluationDone], tokens: int) -> float | None:
    # fsum: the value does not depend on the order of the reports.
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
