"""The scheduler's Prometheus metrics."""

from __future__ import annotations

import json
from collections import Counter as CountBy
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.metrics import LateGauge

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_MEMBER_STATES = ("missing", "joining", "ready", "fencing")
_GAUGES = {
    "loss": ("penstock_scheduler_loss_nats", "Mean loss per counted token of the last attempt"),
    "grad_norm": (
        "penstock_scheduler_gradient_norm",
        "Unclipped global gradient norm of the last attempt",
    ),
    "lr": ("penstock_scheduler_learning_rate", "Learning rate of the last attempt"),
    "loss_scale": ("penstock_scheduler_loss_scale", "Loss scale of the last attempt"),
    "tokens_per_second": (
        "penstock_scheduler_tokens_per_second",
        "Counted tokens per second of the last attempt",
    ),
    "bubble_ratio": (
        "penstock_scheduler_bubble_ratio",
        "Share of the workers' time without computation in the last attempt",
    ),
    "optimizer_tail_seconds": (
        "penstock_scheduler_optimizer_tail_seconds",
        "From the last worker's end to the decision, in the last attempt",
    ),
}


class SchedulerMetrics:
    """All metrics of one scheduler, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._values = {
            key: LateGauge(name, text, self.registry) for key, (name, text) in _GAUGES.items()
        }
        self._eval_loss = self._gauge("evaluation_loss_nats", "Mean loss on held-out data")
        self._version = self._gauge("committed_version", "Committed step")
        self._epochs = Counter(
            "penstock_scheduler_epochs",
            "Epochs begun by this process",
            registry=self.registry,
        )
        self._epoch = 0
        self._saved = self._gauge("saved_version", "Step of the newest saved state")
        self._eta = self._gauge("eta_seconds", "Estimated time to the last step")
        self._members = Gauge(
            "penstock_scheduler_members",
            "Members by state",
            ["state"],
            registry=self.registry,
        )
        self._attempts = Counter(
            "penstock_scheduler_attempts",
            "Decided attempts by decision",
            ["decision"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "penstock_scheduler_tokens", "Counted tokens of all attempts", registry=self.registry
        )
        self._seconds = Histogram(
            "penstock_scheduler_attempt_seconds",
            "Duration of attempts",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def line(self, metrics_json: str) -> None:
        """An attempt was decided, or an evaluation is done."""
        fields: dict[str, Any] = json.loads(metrics_json)
        if fields["phase"] == "eval":
            if fields["loss"] is not None:
                self._eval_loss.set(fields["loss"])
            return
        for key, gauge in self._values.items():
            if fields[key] is not None:
                gauge.set(fields[key])
        self._attempts.labels(decision=fields["decision"]).inc()
        self._tokens.inc(fields["tokens"])
        self._seconds.observe(fields["seconds"])

    def status(self, status: pb.StatusReply) -> None:
        """What holds now."""
        self._version.set(status.version)
        if status.epoch != self._epoch:
            self._epoch = status.epoch
            self._epochs.inc()
        if status.has_saved:
            self._saved.set(status.saved_version)
        if status.eta_seconds >= 0:
            self._eta.set(status.eta_seconds)
        states = CountBy(member.state for member in status.members)
        for state in _MEMBER_STATES:
            self._members.labels(state=state).set(states[state])

    def _gauge(self, name: str, text: str) -> LateGauge:
        return LateGauge(f"penstock_scheduler_{name}", text, self.registry)
