"""The critical path of a step: every second of a measured attempt, on one resource.

From the end of the step the walk goes back along the causes of waits. The decision waited for the
last sweep, the sweep for gradients, the gradients for a backward. The backward waited for a tensor
from another device, and so on to the announcement. Each stretch of time on the way belongs to the
work in it, so the resources' seconds add up to the step. Time between two pieces of work is
overhead.

A resource with many seconds here holds the step back. Another chain of work may be nearly as long,
so the gain without the resource is another question (:mod:`penstock.planner.traces.what_if`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.planner.traces.dependency_graph import Causes, Resource, Work
from penstock.planner.traces.fitted import Fit
from penstock.planner.traces.measured import MeasuredAttempt

MAX_WORKS = 1_000_000
"""A path has fewer pieces; a walk that finds more goes round in circles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A piece of the path, on the trace's clock. ``place``: which device, link or optimizer."""

    resource: Resource
    place: str
    label: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the stretch."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The stretches of a step, in order and without gaps."""

    stretches: tuple[Stretch, ...]

    @property
    def step_s(self) -> float:
        """Seconds of the step: from its announcement to the next, or to the decision's end where
        something else follows.
        """
        return self.stretches[-1].end_s - self.stretches[0].start_s

    @cached_property
    def seconds(self) -> Mapping[Resource, float]:
        """Seconds by resource, 0 included."""
        totals = dict.fromkeys(Resource, 0.0)
        for stretch in self.stretches:
            totals[stretch.resource] += stretch.seconds
        return totals

    @cached_property
    def places(self) -> Mapping[tuple[Resource, str], float]:
        """Seconds by resource and place."""
        totals: dict[tuple[Resource, str], float] = defaultdict(float)
        for stretch in self.stretches:
            totals[stretch.resource, stretch.place] += stretch.seconds
        return dict(totals)


def critical_path(attempt: MeasuredAttempt, fit: Fit) -> CriticalPath:
    """Returns the path of an attempt. ``fit``: costs fitted to it, which tell copies from reads of
    other nodes' memory.
    """
    causes = Causes(
        attempt,
        fit.devices_per_node,
        lambda fetch: fit.copied_s(fetch.phase.value, fetch.stage),
    )
    walked: list[Stretch] = []
    end = causes.end()
    work: Work | None = end
    now_s = end.end_s
    seen: set[tuple[str, str, float]] = set()
    while work is not None and now_s > attempt.announced_s and len(seen) < MAX_WORKS:
        start_s = max(attempt.announced_s, min(work.start_s, now_s))
        now_s = _add(walked, work.resource, work.place, work.label, start_s, now_s)
        seen.add(_key(work))
        before = [other for other in work.before() if _key(other) not in seen]
        latest = max(before, key=lambda other: other.end_s, default=None)
        until_s = attempt.announced_s if latest is None else latest.end_s
        until_s = max(attempt.announced_s, min(until_s, now_s))
        now_s = _add(walked, work.gap, work.place, f"before {work.label}", until_s, now_s)
        work = latest
    _add(walked, Resource.SCHEDULER, "scheduler", "announcement", attempt.announced_s, now_s)
    return CriticalPath(stretches=tuple(reversed(walked)))


def _key(work: Work) -> tuple[str, str, float]:
    return work.place, work.label, work.end_s


def _add(
    found: list[Stretch], resource: Resource, place: str, label: str, start_s: float, end_s: float
) -> float:
    """Adds a stretch, if it is one; returns its start."""
    if end_s > start_s:
        found.append(
            Stretch(resource=resource, place=place, label=label, start_s=start_s, end_s=end_s)
        )
    return start_s
