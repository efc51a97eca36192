"""The reference page, docs/METRICS.md: ``python -m penstock.protocol.metrics.reference``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from penstock.protocol.metrics.memory import MEMORY
from penstock.protocol.metrics.page import Kind, Metric
from penstock.protocol.metrics.scheduler import SCHEDULER

PROCESSES: Mapping[str, Sequence[Metric]] = {
    "schedulerd": SCHEDULER,
    "memoryd": MEMORY,
}
"""All metrics, by the process that has them."""

_HEAD = """# Metrics

Written by `make docs` from `protocol/metrics/`: what each process of a run tells Prometheus.

* Units are base units (seconds, bytes, FLOPs). Counters end in `_total` and begin at 0 with each
  process; rates are made in queries: `rate(penstock_tokens_total[1m])` are tokens per second.
* To every sample the node's exporter adds `run`, `node`, `process` and, of workers, `device`.
* What is not known is absent, not 0.
* *Series* is how many a process has at most: labels have the values listed, and no others. No step,
  attempt, block or stage is a label.
"""


def markdown() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for process, metrics in PROCESSES.items():
        parts.append(f"\n## {process}\n\n| metric | type | labels | series | what it says |\n")
        parts.append("| --- | --- | --- | --- | --- |\n")
        parts += [_row(metric) for metric in metrics]
    return "".join(parts)


def _row(metric: Metric) -> str:
    labels = "<br>".join(
        f"`{label}`: {values if isinstance(values, str) else ', '.join(values)}"
        for label, values in metric.labels.items()
    )
    text = metric.text + (f" Absent {metric.absent}." if metric.absent else "")
    cells = (f"`{metric.full_name}`", metric.kind.name.lower(), labels, _series(metric), text)
    return f"| {' | '.join(cells)} |\n"


def _series(metric: Metric) -> str:
    if any(isinstance(values, str) for values in metric.labels.values()):
        return "few"
    combinations = len(list(metric.combinations()))
    if metric.kind is Kind.HISTOGRAM:
        return str(combinations * (len(metric.buckets) + 3))  # the infinite one, sum, count
    return str(combinations)


if __name__ == "__main__":
    sys.stdout.write(markdown())
