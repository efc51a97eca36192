"""The generated dashboards as data: their panels, and what these ask of Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATED = Path(__file__).parents[2] / "grafana" / "generated"
METRIC = re.compile(r"\bpenstock_[a-z0-9_]+\b")
_OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One query of a panel, with Grafana's variables in it."""

    letter: str
    expr: str
    legend: str
    instant: bool

    def filled(self, run: str, window: str, shown: str, node: str = ".*") -> str:
        """Returns what Grafana asks: ``window`` and ``shown`` (the time shown) are durations."""
        return filled(self.expr, run, window, shown, node)

    def name(self, labels: dict[str, str]) -> str:
        """Returns what the legend calls a series."""
        if self.legend == "__auto":
            return ", ".join(value for key, value in sorted(labels.items()) if key != "__name__")
        return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), self.legend)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel; ``place`` is x, y, width and height in Grafana's grid."""

    dashboard: str
    section: str
    title: str
    kind: str
    description: str
    unit: str
    place: tuple[int, int, int, int]
    asked: tuple[Asked, ...]
    raw: dict[str, Any]

    @property
    def decimals(self) -> int | None:
        """How many digits stand behind the point; None: as many as it takes."""
        found: int | None = self.raw["fieldConfig"]["defaults"].get("decimals")
        return found

    @property
    def key(self) -> str:
        """Names it among all panels."""
        return f"{self.dashboard}: {self.title}"


def filled(expr: str, run: str, window: str, shown: str, node: str = ".*") -> str:
    """Returns an expression with values in place of Grafana's variables.

    Raises:
        AssertionError: it has a variable that is not known here.
    """
    values = {
        "run": run,
        "node": node,
        "window": window,
        "__range": shown,
        "__rate_interval": window,
    }
    return re.sub(r"\$([a-z_]\w*)", lambda found: values[found[1]], expr)


def documents() -> dict[str, dict[str, Any]]:
    """Returns each dashboard's JSON, by the end of its id, in the order of the links."""
    order = ("overview", "time", "memory", "recovery", "node")
    found = {path.stem.removeprefix("penstock-"): path for path in GENERATED.glob("*.json")}
    assert set(found) == set(order), found
    return {name: json.loads(found[name].read_text(encoding="utf-8")) for name in order}


def panels() -> list[Panel]:
    """Returns all panels, texts too."""
    return [panel for name, made in documents().items() for panel in _panels(name, made)]


def _panels(name: str, made: dict[str, Any]) -> Iterator[Panel]:
    section = ""
    for raw in made["panels"]:
        if raw["type"] == "row":
            section = raw["title"]
            yield from (_panel(name, section, inner) for inner in raw.get("panels", ()))
        else:
            yield _panel(name, section, raw)


def _panel(name: str, section: str, raw: dict[str, Any]) -> Panel:
    asked = (
        Asked(
            letter=target["refId"],
            expr=target["expr"],
            legend=target["legendFormat"],
            instant=bool(target.get("instant")),
        )
        for target in raw.get("targets", ())
    )
    place = raw["gridPos"]
    return Panel(
        dashboard=name,
        section=section,
        title=raw["title"],
        kind=raw["type"],
        description=raw.get("description", ""),
        unit=raw.get("fieldConfig", {}).get("defaults", {}).get("unit", ""),
        place=(place.get("x", 0), place.get("y", 0), place["w"], place["h"]),
        asked=tuple(asked),
        raw=raw,
    )


def expressions() -> dict[str, str]:
    """Returns every expression, of annotations too, by where it stands."""
    found = {
        f"{panel.key} {asked.letter}": asked.expr for panel in panels() for asked in panel.asked
    }
    for name, made in documents().items():
        for annotation in made["annotations"]["list"]:
            found[f"{name}: annotation {annotation['name']}"] = annotation["expr"]
    return found


def metrics_of(expr: str) -> set[str]:
    """Returns the names of Penstock's metrics in an expression; histograms without ending."""
    return {_OF_HISTOGRAMS.sub("", name) for name in METRIC.findall(expr)}
