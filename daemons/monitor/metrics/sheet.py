"""Samples that were just measured, written down as a page of Prometheus' text format.

A registry of ``prometheus_client`` counts; here values come from elsewhere, as the kernel has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.utils import floatToGoString

from penstock.protocol.metrics.page import Kind, Metric


def escaped(value: str) -> str:
    """Returns a label's value as it stands between quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def label_text(labels: Mapping[str, str]) -> str:
    """Returns labels as they stand between braces."""
    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


class Sheet:
    """A page of some of ``metrics``, named by what stands in their descriptions."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._lines: dict[str, list[str]] = {}

    def put(self, name: str, value: float, **labels: str) -> None:
        """Write down a sample."""
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
