"""Metrics of observerd: time of sampled steps by resource, possible savings, and trackers."""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter, gauge

RESOURCES = (
    *("compute", "h2d", "d2h", "peer_links", "network"),
    *("optimizer", "data", "scheduler", "overhead"),
)
_NONE = "before the first sampled attempt is analysed"
OBSERVER: tuple[Metric, ...] = (
    counter(
        "penstock_critical_seconds",
        "Seconds of analysed steps by what they were spent on, along the critical path; they sum to"
        " penstock_analysed_step_seconds_total.",
        {"resource": RESOURCES},
    ),
    counter("penstock_analysed_step_seconds", "Seconds of analysed steps."),
    counter("penstock_analysed_attempts", "Attempts that were analysed."),
    counter(
        "penstock_analysis_failures",
        "Sampled attempts that could not be analysed: broken off or without the events of a member"
        " (incomplete), of another plan, or by an error, which the log has.",
        {"reason": ("incomplete", "other_plan", "error")},
    ),
    gauge(
        "penstock_savings_seconds",
        "So much shorter the last analysed step would have been without the time of a resource. Not"
        " to be added up: see penstock_savings_together_seconds.",
        {"resource": RESOURCES},
        absent=_NONE,
    ),
    gauge(
        "penstock_savings_together_seconds",
        "So much shorter without all resources that save 1 % of the step or more.",
        absent=_NONE,
    ),
    gauge(
        "penstock_simulated_step_seconds",
        "What a step should take by the costs that penstock_simulated_step_info names.",
        absent=_NONE,
    ),
    gauge(
        "penstock_simulated_step_info",
        "Always 1. Costs: of the profile or the emulated machine that the run is configured with,"
        " or fitted to the first attempts that were analysed.",
        {"costs": "profile, emulated or fitted"},
        absent=_NONE,
    ),
    gauge(
        "penstock_expected_busy_seconds",
        "What a device should compute in a step, by the same costs.",
        {"device": "numbers of the run's devices"},
        absent=_NONE,
    ),
)
"""All of observerd's own."""


_TRACKER = {"tracker": ("tensorboard", "wandb", "mlflow", "trackio", "opentelemetry")}
TRACKERS: tuple[Metric, ...] = (
    counter(
        "penstock_tracker_lines",
        "Lines of metrics.jsonl that the tracker took, since the run was made.",
        _TRACKER,
        sparse=True,
    ),
    counter(
        "penstock_tracker_dropped",
        "Lines at which the tracker failed again and again, so that it never takes them.",
        _TRACKER,
        sparse=True,
    ),
    gauge(
        "penstock_tracker_up",
        "1 while the tracker's process lives and takes the lines that there are, else 0.",
        _TRACKER,
    ),
)
"""Metrics of the trackers of the run; a run without trackers has none."""
