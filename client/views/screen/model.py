"""The model of the screen: gathers views of a run for the panels."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from penstock.client.views.display import Smoothed
from penstock.client.views.run_view import Metrics, RunView, numbers
from penstock.client.views.screen.curve import Series
from penstock.client.views.screen.events import Events, Limits
from penstock.client.views.screen.resources import Amount, devices, machine
from penstock.client.views.screen.words import Doing, Lane, lane
from penstock.config.evaluation import EVAL
from penstock.daemons.monitor.observer.analysed import Analysed
from penstock.protocol.generated import scheduler_pb2 as pb

LANE_SAMPLES = 120
RESOURCES_EVERY_S = 2.0
STEPS_AVERAGED = 0.9
"""Share of the old average in the division of a step after one more step."""

RESOURCES = MappingProxyType(
    {
        "compute": "computing",
        "h2d": "copies to devices",
        "d2h": "copies to the host",
        "peer_links": "between devices",
        "network": "between nodes",
        "optimizer": "optimizer",
        "data": "reading data",
        "scheduler": "deciding",
        "overhead": "the rest",
    }
)
"""Names of the resources of the critical path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Constants of a run. ``run_dir`` is None for a run on another machine.

    ``leaves``: True if the key ``q`` leaves the screen, False if it stops the run.
    """

    run_dir: Path | None
    limits: Limits = field(default_factory=Limits)
    leaves: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Seconds of a step by part, in the order on the screen.

    ``critical``: True for parts of the critical path of an analysed attempt, False for means over
    devices. ``savings`` are the seconds that a step would be shorter without a part.
    """

    parts: dict[str, float]
    critical: bool
    savings: dict[str, float] = field(default_factory=dict)
    attempt: int = 0

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return sum(self.parts.values())


class Model:
    """The data of the panels; :meth:`take` adds a view."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.view: RunView | None = None
        self.status = pb.StatusReply(eta_seconds=-1.0)
        """The last status of the scheduler."""
        self.last: Metrics | None = None
        self.losses, self.evaluations = Series(), Series(limit=256)
        self._first_set: object = None
        self.smoothed = Smoothed()
        self.events = Events(facts.limits)
        self.lanes: dict[str, Lane] = {}
        self.samples: dict[str, deque[Doing]] = {}
        self.amounts: list[Amount] = []
        self.division: Division | None = None
        self.started_s: float | None = None
        self._due_s = 0.0

    @property
    def phase(self) -> str:
        """The run's phase."""
        return self.view.phase if self.view is not None else "starting"

    @property
    def silent(self) -> bool:
        """True while the scheduler does not answer."""
        return self.view is None or self.view.status is None

    def take(self, view: RunView, now_s: float) -> None:
        """Adds the view of the run at ``now_s`` (Unix time)."""
        self.view = view
        self.started_s = now_s if self.started_s is None else self.started_s
        for line in view.past:
            self._add_line(line, next(iter(numbers([line.get("time")])), None))
        for line in view.fresh:
            self._add_line(line, next(iter(numbers([line.get("time")])), now_s))
        if view.status is not None:
            self.status = view.status
            self.events.add_status(view.status, now_s)
            self._add_members(view.status)
        if now_s >= self._due_s:
            self._due_s = now_s + RESOURCES_EVERY_S
            here = machine(self.status.run_id, self.facts.run_dir)
            self.amounts = [*devices(self.status), *here]
            self._divide()

    def _add_line(self, line: Metrics, now_s: float | None) -> None:
        self.events.add_line(line, now_s)
        series = self.losses
        if line["phase"] == "eval":
            name = line.get("set", EVAL)
            self._first_set = name if self._first_set is None else self._first_set
            if name != self._first_set:
                return  # the picture has room for one
            series = self.evaluations
        for loss in numbers([line.get("loss")]):
            series.add(line["step"], loss)
        if line["phase"] == "train":
            self.last = line
            self.smoothed.add(line.get("loss"))

    def _add_members(self, status: pb.StatusReply) -> None:
        self.lanes = {
            member.member: lane(member, status.phase, status.epoch)
            for member in status.members
            if member.member.partition(".")[0] in ("worker", "optimizerd")
        }
        for name, seen in self.lanes.items():
            samples = self.samples.setdefault(name, deque(maxlen=LANE_SAMPLES))
            samples.append(seen.doing)

    def _divide(self) -> None:
        """Updates the division of a step, from an analysis or from reports of workers."""
        directory = self.facts.run_dir
        left = None if directory is None else Analysed.read(directory)
        critical = None if left is None else analysed(left)
        if critical is not None:
            self.division = critical
            return
        division = reported(self.status, self.last)
        if division is not None:
            self.division = _blended(self.division, division)


def reported(status: pb.StatusReply, last: Metrics | None) -> Division | None:
    """Returns the division of the last step from reports of workers."""
    reports = [m.report for m in status.members if m.report.wall_seconds > 0]
    figures = [] if last is None else numbers([last.get("seconds")])
    if not reports or not figures:
        return None
    [seconds] = figures
    tail = next(iter(numbers([(last or {}).get("optimizer_tail_seconds")])), 0.0)
    tail = min(tail, seconds)
    computing = min(sum(r.busy_seconds for r in reports) / len(reports), seconds - tail)
    longest = max(r.wall_seconds - r.tail_seconds for r in reports)
    bubble = max(0.0, min(longest, seconds - tail) - computing)
    parts = {
        "computing": computing,
        "bubble": bubble,
        "optimizer tail": tail,
        "the rest": max(0.0, seconds - computing - bubble - tail),
    }
    return Division(parts=parts, critical=False)


def _blended(before: Division | None, now: Division) -> Division:
    if before is None or before.critical or before.parts.keys() != now.parts.keys():
        return now
    keep = STEPS_AVERAGED
    parts = {k: keep * before.parts[k] + (1 - keep) * now.parts[k] for k in now.parts}
    return Division(parts=parts, critical=False)


def analysed(analysis: Analysed) -> Division | None:
    """Returns the division of an analysed step, or None if it took no time."""
    critical = _in_words(analysis.critical_s)
    if not critical:
        return None
    savings = _in_words(analysis.savings_s)
    return Division(parts=critical, critical=True, savings=savings, attempt=analysis.attempt)


def _in_words(seconds: Mapping[str, float]) -> dict[str, float]:
    return {
        words: seconds[name]
        for name, words in RESOURCES.items()
        if name in seconds and seconds[name] > 0
    }
