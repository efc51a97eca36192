"""One process's metrics: described as data, counted in plain calls, and rendered for a scrape.

A :class:`Metric` describes a metric before any process exists; docs/METRICS.md is generated from
the descriptions. A process counts into a :class:`MetricRegistry`. The collector of pages adds the
labels that name the run, node, process and device.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector


class Kind(Enum):
    """Kinds of metrics, with what makes one of each."""

    COUNTER = Counter
    GAUGE = Gauge
    HISTOGRAM = Histogram
    INFO = Info


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Description of a metric.

    ``name``: with its unit, without the ``_total`` or ``_info`` that a page adds. ``labels``: all
    values of each label, or a text that describes them if they depend on the run. ``absent``:
    condition without such a metric; empty if it always exists. Counters start at 0 for every
    combination of labels, so that the first event is an increase, unless ``sparse``.
    """

    name: str
    kind: Kind
    text: str
    labels: Mapping[str, Sequence[str] | str] = field(default_factory=dict)
    absent: str = ""
    sparse: bool = False
    buckets: Sequence[float] = ()

    @property
    def full_name(self) -> str:
        """The name as it is scraped."""
        return self.name + {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")

    def combinations(self) -> Iterable[tuple[str, ...]]:
        """Returns all combinations of labels; none if they depend on the run."""
        if any(isinstance(values, str) for values in self.labels.values()):
            return ()
        return itertools.product(*(tuple(values) for values in self.labels.values()))

    def make(self) -> MetricWrapperBase:
        """Returns the metric itself, with the samples that it has from the start."""
        options = {"buckets": self.buckets} if self.buckets else {}
        labels = () if self.kind is Kind.INFO else tuple(self.labels)
        made: MetricWrapperBase = self.kind.value(
            self.name, self.text, labels, registry=None, **options
        )
        if self.labels and self.kind is Kind.COUNTER and not self.sparse:
            for values in self.combinations():
                made.labels(*values)
        return made


def counter(
    name: str,
    text: str,
    labels: Mapping[str, Sequence[str] | str] | None = None,
    *,
    sparse: bool = False,
    absent: str = "",
) -> Metric:
    """Returns a counter; ``name`` without ``_total``."""
    return Metric(
        name=name,
        kind=Kind.COUNTER,
        text=text,
        labels=labels or {},
        sparse=sparse,
        absent=absent,
    )


def gauge(
    name: str,
    text: str,
    labels: Mapping[str, Sequence[str] | str] | None = None,
    *,
    absent: str = "",
) -> Metric:
    """Returns a gauge. One that has nothing to say at first is ``absent``: 0 would be taken for a
    measurement.
    """
    return Metric(name=name, kind=Kind.GAUGE, text=text, labels=labels or {}, absent=absent)


def histogram(
    name: str,
    text: str,
    buckets: Sequence[float],
    labels: Mapping[str, Sequence[str] | str] | None = None,
) -> Metric:
    """Returns a histogram with ``buckets``, upper bounds without the infinite one."""
    return Metric(
        name=name, kind=Kind.HISTOGRAM, text=text, labels=labels or {}, buckets=tuple(buckets)
    )


def info(name: str, text: str, labels: Mapping[str, str]) -> Metric:
    """Returns a metric that is always 1, and says something by its labels."""
    return Metric(name=name, kind=Kind.INFO, text=text, labels=labels)


class MetricRegistry(Collector):
    """The metrics of a process. Counting takes about a microsecond, from any thread."""

    def __init__(self, metrics: Iterable[Metric], registry: CollectorRegistry) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        present = (m for m in self._metrics.values() if not m.absent and m.kind is not Kind.INFO)
        self._made = {metric.name: metric.make() for metric in present}
        self._lock = threading.Lock()  # for _made: any thread makes and forgets metrics
        self._refreshing: list[Callable[[], None]] = []
        registry.register(self)

    def refreshed_by(self, refresh: Callable[[], None]) -> None:
        """Calls ``refresh`` before every scrape, on the scraping thread, to update values."""
        self._refreshing.append(refresh)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Adds to a counter."""
        self._of(name, labels).inc(amount)  # type: ignore[attr-defined]

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        self._of(name, labels).set(value)  # type: ignore[attr-defined]

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds an observation to a histogram."""
        self._of(name, labels).observe(value)  # type: ignore[attr-defined]

    def say(self, name: str, values: dict[str, str]) -> None:
        """Sets the values of an info."""
        self._of(name, ()).info(values)  # type: ignore[attr-defined]

    def ask(self, name: str, value: Callable[[], float], *labels: str) -> None:
        """Makes a gauge report the value of ``value()`` at each scrape."""
        self._of(name, labels).set_function(value)  # type: ignore[attr-defined]

    def forget(self, name: str) -> None:
        """Makes a metric absent until it is set again."""
        with self._lock:
            self._made.pop(name, None)

    def collect(self) -> Iterable[Family]:
        """Returns all metrics, brought up to date."""
        for refresh in self._refreshing:
            refresh()
        return [family for made in list(self._made.values()) for family in made.collect()]

    def describe(self) -> Iterable[Family]:
        """Returns the metrics' names, for a registry's check that no other collector has them."""
        return [family for m in self._metrics.values() for family in m.make().collect()]

    def _of(self, name: str, labels: tuple[str, ...]) -> MetricWrapperBase:
        made = self._made.get(name)
        if made is None:
            with self._lock:  # two threads must not make two
                made = self._made.setdefault(name, self._metrics[name].make())
        return made.labels(*labels) if labels else made
