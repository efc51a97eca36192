"""What Prometheus answers to a panel, over the time of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.grafana.reading import Asked, Panel, panels
from tests.integration.dashboards.runs import SCRAPE_S, WINDOW_S, Seen
from tests.integration.prometheus import Prometheus

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series of an answer, by what the legend calls it; values that are numbers only."""

    name: str
    labels: dict[str, str]
    points: Points

    @property
    def values(self) -> tuple[float, ...]:
        """Its values, oldest first."""
        return tuple(value for _, value in self.points)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All lines of a panel's queries: ``by_query`` has those of each, by its letter."""

    panel: Panel
    run: str
    by_query: dict[str, tuple[Line, ...]]

    @property
    def lines(self) -> tuple[Line, ...]:
        """All lines."""
        return tuple(line for lines in self.by_query.values() for line in lines)

    def line(self, name: str) -> Line:
        """Returns the one line of a name.

        Raises:
            AssertionError: there is none, or more.
        """
        found = [line for line in self.lines if line.name == name]
        assert len(found) == 1, f"{self.panel.key}, {name}: {[line.name for line in self.lines]}"
        return found[0]

    def greatest(self, name: str = "") -> float:
        """Returns the greatest value of all lines, or of those of a name; 0 if there are none."""
        values = (v for line in self.lines if name in ("", line.name) for v in line.values)
        return max(values, default=0.0)


def answer(prometheus: Prometheus, panel: Panel, seen: Seen) -> Answer:
    """Ask what a panel asks: a query for a moment at the run's end, others for all its time."""
    lines = {asked.letter: _lines(prometheus, asked, seen) for asked in panel.asked}
    return Answer(panel=panel, run=seen.name, by_query=lines)


def answers_of(prometheus: Prometheus, seen: Seen) -> dict[str, Answer]:
    """Returns the answers to all panels, by their keys."""
    return {panel.key: answer(prometheus, panel, seen) for panel in panels() if panel.asked}


def _lines(prometheus: Prometheus, asked: Asked, seen: Seen) -> tuple[Line, ...]:
    shown = f"{max(WINDOW_S, round(seen.end_s - seen.start_s))}s"
    expr = asked.filled(seen.name, f"{WINDOW_S}s", shown)
    if asked.instant:
        found = prometheus.query(expr, seen.end_s)
    else:
        found = prometheus.query_range(expr, seen.start_s, seen.end_s, SCRAPE_S)
    lines = []
    for series in found:
        points = tuple(point for point in series.points if math.isfinite(point[1]))
        if points:
            name = asked.name(series.labels)
            lines.append(Line(name=name, labels=series.labels, points=points))
    return tuple(lines)
