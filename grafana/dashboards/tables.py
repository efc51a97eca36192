"""Renders the tables of panels: ``python -m penstock.grafana.dashboards.tables FOLDER``.

A table is a YAML file with ``title``, ``why`` (an explanation) and ``sections``, each with
``title``, ``panels`` and perhaps ``folded: true``. A panel is a mapping:

* the kind (a key of :data:`~penstock.grafana.dashboards.panels.BUILDERS`) names the title:
  ``lines: Loss``; or ``shared: NAME`` takes the panel from ``shared.yaml``;
* ``why`` explains the panel;
* ``each`` holds queries for the time range shown, ``last`` for its end, ``heatmap`` for buckets: a
  mapping of legend to PromQL, or only PromQL;
* ``options`` are fields of :class:`~penstock.grafana.dashboards.panels.Panel`.

``{RUN}`` selects the chosen run, ``{NODES}`` the chosen nodes of the run. Metrics of schedulerd and
observerd belong to the whole run, so ``{RUN}`` selects them. Sums drop the scraped address, which
changes when a process or a node restarts. Rates are averages over ``$window``, a variable, since
steps take from milliseconds to minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from penstock.grafana.dashboards import colors
from penstock.grafana.dashboards.frame import Section, dashboard
from penstock.grafana.dashboards.panels import BUILDERS, DEFAULTS, Panel, Query

FOLDER = Path(__file__).parent
NAMES = ("overview", "time", "memory", "recovery", "node")
_WORDS = {
    "{RUN": '{run="$run"',
    "{NODES": '{run="$run", node=~"$node"',
    "STATE_NUMBERS": " or ".join(
        f'label_replace(vector({number}), "state", "{state}", "", "")'
        for number, state in enumerate(colors.STATES)
    ),
}
"""Words of queries, and the PromQL that each stands for."""


def documents() -> dict[str, str]:
    """Returns the JSON of each dashboard, by file name."""
    shared = _read("shared")
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"penstock-{n}.json": encoder.encode(_render(n, shared)) + "\n" for n in NAMES}


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    return content


def _render(name: str, shared: Mapping[str, Any]) -> object:
    table = _read(name)
    sections = [
        Section(
            title=section["title"],
            panels=[_panel(entry, shared) for entry in section["panels"]],
            folded=section.get("folded", False),
        )
        for section in table["sections"]
    ]
    published = table.get("published", False)
    return dashboard(name, table["title"], table["why"], sections, published=published)


def _panel(entry: Mapping[str, Any], shared: Mapping[str, Any]) -> Builder[Any]:
    options = entry.get("options", {})
    if "shared" in entry:
        entry = shared[entry["shared"]]
        options = {**entry["options"], **options}
    [kind] = entry.keys() & BUILDERS.keys()
    options = {**DEFAULTS[kind], **options}
    if isinstance(series := options.get("colors"), str):
        options["colors"] = getattr(colors, series)
    if options.get("names") == "STATES":
        states = enumerate(colors.STATES)
        options["names"] = {number: (state, colors.COLORS[state]) for number, state in states}
    panel = Panel(title=entry[kind], why=entry["why"], queries=tuple(_queries(entry)), **options)
    return BUILDERS[kind](panel)


def _queries(entry: Mapping[str, Any]) -> Iterator[Query]:
    for mode in ("each", "last", "heatmap"):
        queries = entry.get(mode, {})
        for legend, expr in ({"": queries} if isinstance(queries, str) else queries).items():
            for word, promql in _WORDS.items():
                expr = expr.replace(word, promql)
            yield Query(expr=expr, legend=legend, mode=mode)


if __name__ == "__main__":
    for name, text in documents().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
