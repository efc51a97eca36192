"""Prometheus' text format (the exposition format): writes measured samples, and merges the
expositions of many processes into one.

Expositions are split and joined as text, since parsing each sample would cost many times as much. A
family (a metric with its HELP and TYPE) may appear once in an exposition. The samples of all
processes therefore follow the header of the first one. Lines that are no sample are dropped, and
families with another type than the first one's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.utils import floatToGoString

from penstock.protocol.metrics.registry import Kind, Metric

_FAMILY = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(?: [^\n]*)?\n"
    rb"# TYPE \1 (counter|gauge|histogram|summary|untyped)\n"
)
"""Text after ``# HELP``: a family's name, its help and its type."""
_SAMPLE = re.compile(
    rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([-+0-9.eE]+|[-+]?Inf|NaN)$", re.MULTILINE
)


def escaped(value: str) -> str:
    """Returns a label's value as it stands between quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def label_text(labels: Mapping[str, str]) -> str:
    """Returns labels as they stand between braces."""
    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


class Exposition:
    """A page of some of ``metrics``, named by what stands in their descriptions."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._lines: dict[str, list[str]] = {}

    def put(self, name: str, value: float, **labels: str) -> None:
        """Adds a sample."""
        full_name = self._metrics[name].full_name
        braces = f"{{{label_text(labels)}}}" if labels else ""
        number = floatToGoString(value)  # type: ignore[no-untyped-call]  # of the library
        self._lines.setdefault(name, []).append(f"{full_name}{braces} {number}\n")

    def page(self) -> bytes:
        """Returns what was written down, by family."""
        return "".join(self._family(name, lines) for name, lines in self._lines.items()).encode()

    def _family(self, name: str, lines: Iterable[str]) -> str:
        metric = self._metrics[name]
        kind = "gauge" if metric.kind is Kind.INFO else metric.kind.name.lower()
        head = f"# HELP {metric.full_name} {metric.text}\n# TYPE {metric.full_name} {kind}\n"
        return head + "".join(lines)


@dataclass(slots=True)
class _Family:
    header: bytes
    kind: bytes
    samples: list[bytes] = field(default_factory=list)


class MergedExposition:
    """A page to which those of processes are added."""

    def __init__(self) -> None:
        self._families: dict[bytes, _Family] = {}

    def add(self, page: bytes, labels: Mapping[str, str]) -> None:
        """Adds the exposition of a process, with ``labels`` in front of its samples' own labels."""
        ours = label_text(labels).encode()
        for part in re.split(rb"^# HELP ", page, flags=re.MULTILINE):
            begun = _FAMILY.match(part)
            if begun is None:
                continue
            name, kind = begun.groups()
            header = b"# HELP " + begun.group()
            family = self._families.setdefault(name, _Family(header, kind))
            if family.kind != kind:
                continue
            for match in _SAMPLE.finditer(part, begun.end()):
                sample, others, value = match.groups()
                family.samples.append(
                    b"%s{%s,%s} %s" % (sample, ours, others, value)
                    if others
                    else b"%s{%s} %s" % (sample, ours, value)
                )

    def text(self) -> bytes:
        """Returns the whole page."""
        parts = [
            family.header + b"\n".join(family.samples) + b"\n"
            for family in self._families.values()
            if family.samples
        ]
        return b"".join(parts)
