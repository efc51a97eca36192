"""The reference page, docs/METRICS.md: ``python -m penstock.protocol.metrics.reference``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence

from penstock.protocol.metrics.memory import FETCH, MEMORY, MIRROR
from penstock.protocol.metrics.node import EVERY, METRICSD, NODE
from penstock.protocol.metrics.observer import OBSERVER, TRACKERS
from penstock.protocol.metrics.optimizer import OPTIMIZER
from penstock.protocol.metrics.registry import Kind, Metric
from penstock.protocol.metrics.scheduler import SCHEDULER
from penstock.protocol.metrics.worker import WORKER

PROCESSES: Mapping[str, Sequence[Metric]] = {
    "every process": EVERY,
    "schedulerd": SCHEDULER,
    "memoryd": MEMORY,
    "optimizerd": OPTIMIZER,
    "mirrord": MIRROR,
    "worker": WORKER,
    "fetchd": FETCH,
    "node": NODE,
    "metricsd": METRICSD,
    "observerd": (*OBSERVER, *TRACKERS),
}
"""All metrics, by the process that has them."""

_HEAD = """# Metrics

Written by `make docs` from `protocol/metrics/`: the metrics that each process of a run gives to
Prometheus. [SEEING.md](SEEING.md) has dashboards and ways to collect them.

* Units are base units (seconds, bytes, FLOPs). Counters end in `_total` and begin at 0 with each
  process; rates are made in queries: `rate(penstock_tokens_total[1m])` are tokens per second.
* The node's exporter adds `run`, `node`, `process` and, for workers, `device` to every sample.
* An unknown value is absent, not 0.
* The number of series is the most that a process has: labels have only the listed values. No step,
  attempt, block or stage is a label.
"""


def markdown() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for process, metrics in PROCESSES.items():
        parts.append(f"\n## {process}\n\n")
        parts += [_entry(metric) for metric in metrics]
    return "".join(parts)


def _entry(metric: Metric) -> str:
    kind = metric.kind.name.lower()
    parts = [f"* `{metric.full_name}`: {kind}, {_series(metric)}. {metric.text}"]
    if metric.absent:
        parts.append(f"Absent {metric.absent}.")
    for label, values in metric.labels.items():
        named = values if isinstance(values, str) else ", ".join(values)
        parts.append(f"Label `{label}`: {named}.")
    text = " ".join(parts)
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _series(metric: Metric) -> str:
    if any(isinstance(values, str) for values in metric.labels.values()):
        return "a few series"
    count = len(list(metric.combinations()))
    if metric.kind is Kind.HISTOGRAM:
        count *= len(metric.buckets) + 3  # the infinite one, sum, count
    return "1 series" if count == 1 else f"{count} series"


if __name__ == "__main__":
    sys.stdout.write(markdown())
