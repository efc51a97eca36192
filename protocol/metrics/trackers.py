"""Metrics of trackers, which observerd reports: further destinations of lines of
``metrics.jsonl``.
"""

from __future__ import annotations

from penstock.protocol.metrics.registry import Metric, counter, gauge

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
