"""Metrics of schedulerd: the run as a whole."""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter, gauge, histogram

DECISIONS = ("commit", "amend", "skip")
MEMBER_STATES = ("missing", "joining", "ready", "fencing")
BREAK_CAUSES = (
    "lost_member",
    "silent_member",
    "hung_member",
    "failed_member",
    "asked",
    "other",
)
PHASES = (
    "gathering",
    "fencing",
    "draining",
    "restoring",
    "beginning",
    "running",
    "deciding",
    "amending",
    "mirroring",
    "settling",
    "saving",
    "evaluating",
    "paused",
    "stopping",
    "done",
    "failed",
)
_LONG = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_SHORT = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

_FIRST = "before the first attempt"
_UNEVALUATED = "before the first evaluation"
_SET = {"set": "name of each set; eval for that of train.eval_every"}

TRAINING = (
    gauge(
        "penstock_loss",
        "Loss of the last attempt in nats: the mean that `train.loss_mean` names.",
        absent=_FIRST,
    ),
    gauge(
        "penstock_evaluation_loss",
        "Mean loss per counted token of an evaluation set, in nats.",
        _SET,
        absent=_UNEVALUATED,
    ),
    gauge(
        "penstock_evaluation_perplexity",
        "Exponential of the mean loss of an evaluation set.",
        _SET,
        absent=f"{_UNEVALUATED}, and while it is beyond 1e304",
    ),
    gauge(
        "penstock_evaluation_token_accuracy",
        "Share of an evaluation set's counted tokens that the model ranks first.",
        _SET,
        absent=f"{_UNEVALUATED}, and on emulated devices",
    ),
    gauge(
        "penstock_evaluation_pair_accuracy",
        "Share of an evaluation set's pairs of answers with a margin above 0.",
        _SET,
        absent=f"{_UNEVALUATED}, and without pairs of answers",
    ),
    gauge(
        "penstock_gradient_norm",
        "Global gradient norm of the last attempt, before clipping.",
        absent=f"{_FIRST}, and until a norm is finite",
    ),
    gauge("penstock_learning_rate", "Learning rate of the last attempt.", absent=_FIRST),
    gauge("penstock_loss_scale", "Loss scale of the last attempt.", absent=_FIRST),
    gauge(
        "penstock_loss_scale_floor",
        "The loss scale does not go below this (optimizer.loss_scale_min).",
        absent="without fp16 weights",
    ),
    gauge(
        "penstock_clip_limit",
        "Gradient norms over this are scaled down to it (train.clip_grad_norm).",
        absent="without the key",
    ),
    gauge("penstock_step", "Committed step."),
    gauge(
        "penstock_standstill_seconds",
        "Seconds without progress of any member; 0 while nothing is to do.",
    ),
    gauge("penstock_steps", "Steps that the run is to take (train.steps)."),
    gauge(
        "penstock_eta_seconds", "Estimated time to the last step.", absent="while it is not known"
    ),
    counter("penstock_tokens", "Counted tokens of all decided attempts."),
    gauge("penstock_data_position_samples", "Samples consumed, over all passes over the data."),
    gauge(
        "penstock_data_samples",
        "Samples of one pass over the training data; after them another pass begins, in another"
        " order.",
        absent="where data are made up",
    ),
    gauge("penstock_data_passes", "Planned passes over the data: train.epochs, else data.passes."),
)

ATTEMPTS = (
    counter("penstock_attempts", "Decided attempts.", {"decision": DECISIONS}),
    counter(
        "penstock_attempts_broken",
        "Attempts that were dropped undecided, to be repeated.",
        {"cause": BREAK_CAUSES},
    ),
    histogram("penstock_attempt_seconds", "Duration of decided attempts.", _LONG),
    histogram(
        "penstock_commit_latency_seconds",
        "From the last report of an attempt to the decision's being journaled and announced,"
        " amending included.",
        _SHORT,
    ),
    counter(
        "penstock_optimizer_tail_seconds",
        "From the last gradient of an attempt to its decision: work of the optimizer without"
        " computation. Part of the attempts' seconds.",
    ),
    counter(
        "penstock_between_attempts_seconds",
        "From decisions to what was announced next: journal, messages, lines of metrics.",
    ),
    counter("penstock_evaluation_seconds", "Spent on evaluations."),
    counter("penstock_paused_seconds", "Spent paused, on request."),
)

MEMBERS = (
    gauge("penstock_members", "Members by state.", {"state": MEMBER_STATES}),
    gauge("penstock_phase", "1 for what the run is doing, 0 for all else.", {"phase": PHASES}),
    counter(
        "penstock_epochs",
        "Memberships (times with the same members) begun by this process: one more after each"
        " break.",
    ),
    histogram(
        "penstock_recovery_seconds",
        "From the break of a membership to the next attempt's being announced.",
        _LONG,
    ),
    gauge(
        "penstock_run_ended",
        "Exit code of the run, while the scheduler waits for those that watch it.",
        absent="while it runs",
    ),
)

SAVES = (
    counter("penstock_saves", "Saves of the state to disk.", {"outcome": ("done", "failed")}),
    counter("penstock_save_seconds", "Spent on saves, settling included."),
    counter("penstock_save_bytes", "Bytes of finished saves."),
    counter("penstock_save_blocked_seconds", "Spent on saves while more steps waited."),
    gauge("penstock_saved_step", "Step of the newest saved state.", absent="without one"),
    gauge(
        "penstock_save_interval_seconds",
        "Time between saves that train.save_every leads to at the pace of the last attempts.",
        absent="without the key, and before the first attempt",
    ),
    gauge(
        "penstock_last_commit_timestamp_seconds",
        "When the last step was committed, in seconds since 1970.",
        absent="before the first",
    ),
    gauge(
        "penstock_last_snapshot_timestamp_seconds",
        "When the newest saved state was complete, in seconds since 1970.",
        absent="without one",
    ),
)

SCHEDULER: tuple[Metric, ...] = (*TRAINING, *ATTEMPTS, *MEMBERS, *SAVES)
"""All of schedulerd's."""
