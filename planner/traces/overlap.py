"""The share of some work that happens while other work does: copies and optimizer behind
computation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.host.sums import added
from penstock.planner.simulate import Span
from penstock.protocol.plan.semantics import Lane

Interval = tuple[float, float]

_COPIES = (Lane.FETCH, Lane.OFFLOAD, Lane.SWAP, Lane.LINK, Lane.REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """``seconds`` of work, of which ``hidden_s`` while there was computation."""

    seconds: float
    hidden_s: float

    @property
    def share(self) -> float | None:
        """Hidden share; ``None`` where there is no work."""
        return self.hidden_s / self.seconds if self.seconds > 0.0 else None

    def __add__(self, other: Overlap) -> Overlap:
        """Adds the work of both."""
        return Overlap(
            seconds=self.seconds + other.seconds, hidden_s=self.hidden_s + other.hidden_s
        )


def copies_behind_compute(spans: Iterable[Span]) -> Overlap:
    """Returns how much of what each device copies and sends happens while it computes itself."""
    work = list(spans)
    devices = {span.place for span in work if span.lane in _COPIES}
    total = Overlap(seconds=0.0, hidden_s=0.0)
    for device in devices:
        on_device = [span for span in work if span.place == device]
        total += overlap(
            (_interval(span) for span in on_device if span.lane in _COPIES),
            (_interval(span) for span in on_device if span.lane is Lane.COMPUTE),
        )
    return total


def optimizer_behind_compute(spans: Iterable[Span], devices_per_node: int) -> Overlap:
    """Returns how much of what each node's optimizer does happens while a device of the node
    computes.
    """
    work = list(spans)
    nodes = {span.place for span in work if span.lane is Lane.OPTIMIZER}
    total = Overlap(seconds=0.0, hidden_s=0.0)
    for node in nodes:
        total += overlap(
            (_interval(s) for s in work if s.lane is Lane.OPTIMIZER and s.place == node),
            (
                _interval(s)
                for s in work
                if s.lane is Lane.COMPUTE and s.place // devices_per_node == node
            ),
        )
    return total


def overlap(work: Iterable[Interval], cover: Iterable[Interval]) -> Overlap:
    """Returns the seconds in the union of ``work``, and how much of that is in the union of
    ``cover``.
    """
    mine, others = union(work), union(cover)
    hidden_s, place = 0.0, 0
    for start, end in mine:
        while place < len(others) and others[place][1] <= start:
            place += 1
        index = place
        while index < len(others) and others[index][0] < end:
            hidden_s += min(end, others[index][1]) - max(start, others[index][0])
            index += 1
    return Overlap(seconds=added(end - start for start, end in mine), hidden_s=hidden_s)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same times as disjoint intervals, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _interval(span: Span) -> Interval:
    return span.start_s, span.end_s
