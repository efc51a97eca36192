"""Makes one page of Prometheus' text format of many, and says of every sample whose it is.

Pages are cut and put together as text, since parsing each sample would cost many times as much. A
family (a metric with its HELP and TYPE) stands on a page once, so the samples of all processes
gather under the first one's header. What is no sample, or a family of another type than before, is
left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.daemons.monitor.metrics.sheet import label_text

_FAMILY = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(?: [^\n]*)?\n"
    rb"# TYPE \1 (counter|gauge|histogram|summary|untyped)\n"
)
"""What follows ``# HELP``."""
_SAMPLE = re.compile(
    rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([-+0-9.eE]+|[-+]?Inf|NaN)$", re.MULTILINE
)


@dataclass(slots=True)
class _Family:
    header: bytes
    kind: bytes
    samples: list[bytes] = field(default_factory=list)


class MergedPage:
    """A page to which those of processes are added."""

    def __init__(self) -> None:
        self._families: dict[bytes, _Family] = {}

    def add(self, page: bytes, labels: Mapping[str, str]) -> None:
        """Add a page, with ``labels`` put before those that its samples have."""
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
            for found in _SAMPLE.finditer(part, begun.end()):
                sample, others, value = found.groups()
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
