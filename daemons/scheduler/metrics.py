"""Metrics of the scheduler. :mod:`penstock.protocol.metrics.scheduler` has names and meanings."""

from __future__ import annotations

import json
import logging
from collections import Counter as CountBy
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.config.evaluation import metrics_of
from penstock.config.schema import Config
from penstock.daemons.scheduler.machine.evaluations import Score
from penstock.daemons.scheduler.machine.history import BreakCause, Counters
from penstock.daemons.scheduler.machine.position import Position
from penstock.daemons.scheduler.machine.status import Observable, step_seconds
from penstock.host.files import DAMAGED, parse_json
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.metrics.scheduler import MEMBER_STATES, PHASES, SCHEDULER
from penstock.shm.table import DType

_log = logging.getLogger(__name__)

_GAUGES = {
    "loss": "penstock_loss",
    "grad_norm": "penstock_gradient_norm",
    "lr": "penstock_learning_rate",
    "loss_scale": "penstock_loss_scale",
}
"""Gauges that show the last attempt, by field of a line of metrics."""


_MEANS = {
    "loss": "penstock_evaluation_loss",
    "perplexity": "penstock_evaluation_perplexity",
    "token_accuracy": "penstock_evaluation_token_accuracy",
    "pair_accuracy": "penstock_evaluation_pair_accuracy",
}
"""Gauges that show the last evaluation of a set, by field of a line of metrics."""


class SchedulerMetrics:
    """All metrics of one scheduler, in a registry of their own. Counters start at 0 with each
    process; gauges come back from the journal.
    """

    def __init__(self, config: Config, data_samples: int | None) -> None:
        self.registry = CollectorRegistry()
        self._page = MetricRegistry(SCHEDULER, self.registry)
        self._metrics = metrics_of(pairs=config.trains_on_pairs)
        self._save_every = config.train.save_every
        self._epoch = 0
        self._counted = Counters()
        self._page.set("penstock_steps", config.train.steps)
        passes = config.planned_passes
        if data_samples is not None:
            self._page.set("penstock_data_samples", data_samples)
        if data_samples and config.train.epochs is not None:
            # The last step is rounded up into the next pass, which is no reason for an alert.
            passes = max(passes, config.train.steps * config.train.global_batch / data_samples)
        self._page.set("penstock_data_passes", passes)
        if config.train.clip_grad_norm is not None:
            self._page.set("penstock_clip_limit", config.train.clip_grad_norm)
        if config.model.dtype is DType.FP16:
            self._page.set("penstock_loss_scale_floor", config.optimizer.loss_scale_min)

    def recall(
        self,
        train_line: str,
        scores: Sequence[Score],
        saved_at_s: float | None,
        position: Position | None,
    ) -> None:
        """Shows values of an earlier scheduler: its last line (empty for none), its evaluations in
        order, its position, and when it saved last.
        """
        try:
            if train_line:
                self._show_last(parse_json(train_line))
        except DAMAGED as error:
            _log.warning("metrics show nothing of a damaged line of the journal: %r", error)
        for score in {score.set_name: score for score in scores}.values():
            self._show_means(
                score.set_name,
                {metric: score.value(metric) for metric in self._metrics},
            )
        if saved_at_s is not None:
            self._page.set("penstock_last_snapshot_timestamp_seconds", saved_at_s)
        if position is not None:
            self._page.set("penstock_step", position.version)
            self._page.set("penstock_data_position_samples", position.data_position)

    def _show_last(self, fields: dict[str, Any]) -> None:
        self._show(fields)
        if "time" in fields:  # lines of an older Penstock have none
            self._page.set("penstock_last_commit_timestamp_seconds", fields["time"])

    def line(self, metrics_json: str) -> None:
        """Adds a line of an attempt or an evaluation."""
        fields: dict[str, Any] = json.loads(metrics_json)
        if fields["phase"] == "eval":
            self._show_means(fields["set"], fields)
            self._page.add("penstock_evaluation_seconds", fields["seconds"])
            return
        self._show(fields)
        self._page.add("penstock_attempts", 1, fields["decision"])
        self._page.add("penstock_tokens", fields["tokens"])
        self._page.observe("penstock_attempt_seconds", fields["seconds"])
        self._page.add("penstock_optimizer_tail_seconds", fields["optimizer_tail_seconds"])
        if fields["decision"] != "skip":
            self._page.set("penstock_step", fields["step"])
            self._page.set("penstock_last_commit_timestamp_seconds", fields["time"])

    def announced(self, seconds: float) -> None:
        """Adds the seconds from an attempt's last report to the announced decision."""
        self._page.observe("penstock_commit_latency_seconds", seconds)

    def went_on(self, seconds: float) -> None:
        """Adds the seconds from a decision to the next activity."""
        self._page.add("penstock_between_attempts_seconds", seconds)

    def saved(self, time_s: float) -> None:
        """Shows the time of a saved state, ``time_s`` since 1970."""
        self._page.set("penstock_last_snapshot_timestamp_seconds", time_s)

    def ended(self, code: int) -> None:
        """Shows the exit code of the run."""
        self._page.set("penstock_run_ended", code)

    def update(self, machine: Observable, status: pb.StatusReply, now_s: float) -> None:
        """Shows the machine's state at ``now_s``."""
        still_s = 0.0 if machine.activity is None else machine.hangs.still_s(now_s)
        self._page.set("penstock_standstill_seconds", still_s)
        self._page.set("penstock_step", status.version)
        if machine.mirror.position is not None:
            position = machine.mirror.position.data_position
            self._page.set("penstock_data_position_samples", position)
        if status.epoch != self._epoch:
            self._epoch = status.epoch
            self._page.add("penstock_epochs", 1)
        if status.has_saved:
            self._page.set("penstock_saved_step", status.saved_version)
        if status.eta_seconds >= 0:
            self._page.set("penstock_eta_seconds", status.eta_seconds)
        seconds = step_seconds(machine)
        if self._save_every and seconds is not None:
            self._page.set("penstock_save_interval_seconds", self._save_every * seconds)
        states = CountBy(member.state for member in status.members)
        for state in MEMBER_STATES:
            self._page.set("penstock_members", states[state], state)
        for phase in PHASES:
            self._page.set("penstock_phase", float(phase == status.phase), phase)
        self._count(machine.counters)

    def _count(self, counters: Counters) -> None:
        """Adds the growth of the machine's counters since the last call."""
        before = self._counted
        for cause in BreakCause:
            more = counters.broken[cause] - before.broken[cause]
            self._page.add("penstock_attempts_broken", more, cause)
        for seconds in counters.recoveries_s[len(before.recoveries_s) :]:
            self._page.observe("penstock_recovery_seconds", seconds)
        add = self._page.add
        add("penstock_paused_seconds", counters.paused_s - before.paused_s)
        add("penstock_saves", counters.saves_done - before.saves_done, "done")
        add("penstock_saves", counters.saves_failed - before.saves_failed, "failed")
        add("penstock_save_seconds", counters.save_s - before.save_s)
        add("penstock_save_blocked_seconds", counters.save_blocked_s - before.save_blocked_s)
        add("penstock_save_bytes", counters.saved_bytes - before.saved_bytes)
        self._counted = counters.copy()

    def _show(self, fields: dict[str, Any]) -> None:
        for field, name in _GAUGES.items():
            if fields[field] is not None:
                self._page.set(name, fields[field])

    def _show_means(self, set_name: str, means: Mapping[str, Any]) -> None:
        """Shows the means of an evaluation that have a value."""
        for field, name in _MEANS.items():
            if means.get(field) is not None:
                self._page.set(name, means[field], set_name)
