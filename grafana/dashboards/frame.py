"""The frame of all dashboards: variables, links between dashboards, annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from penstock.grafana.dashboards.panels import DATASOURCE

RUN, WINDOW = 'run="$run"', "$window"

TAG = "penstock"
WINDOWS = "15s,30s,1m,2m,5m,15m,1h,6h"
PUBLISHED = {
    "NVIDIA GPUs (DCGM exporter)": "https://grafana.com/grafana/dashboards/12239",
    "The machine (node exporter)": "https://grafana.com/grafana/dashboards/1860",
}
"""Published dashboards with metrics that Penstock does not measure, and their pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A row of a dashboard with its panels; a click opens a ``folded`` row."""

    title: str
    panels: Sequence[Builder[Any]]
    folded: bool = False


def dashboard(
    name: str, title: str, why: str, sections: Sequence[Section], *, published: bool = False
) -> model.Dashboard:
    """Returns a dashboard; its id and file name end in ``name``. ``published`` adds links to
    :data:`PUBLISHED`.
    """
    made = build.Dashboard(f"Penstock / {title}").uid(f"penstock-{name}").description(why)
    made.tags([TAG]).timezone("browser").time("now-1h", "now").refresh("10s")
    made.tooltip(model.DashboardCursorSync.CROSSHAIR).readonly()
    for variable in _variables():
        made.with_variable(variable)
    for annotation in _annotations():
        made.annotation(annotation)
    made.link(
        build.DashboardLink("Penstock")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )
    for text, url in PUBLISHED.items() if published else ():
        link = build.DashboardLink(text).type(model.DashboardLinkType.LINK).url(url)
        made.link(link.icon("external link").target_blank(True).tooltip(f"Import by its id: {url}"))
    for section in sections:
        row = build.Row(section.title)
        if section.folded:
            for panel in section.panels:
                row.with_panel(panel)
            made.with_row(row.collapsed(True))
            continue
        made.with_row(row)
        for panel in section.panels:
            made.with_panel(panel)
    return _numbered(made.build())


def _numbered(made: model.Dashboard) -> model.Dashboard:
    """Numbers the panels; links to a single panel use the number."""
    number = 0
    for panel in made.panels or []:
        number += 1
        panel.id_val = number
        for inner in panel.panels if isinstance(panel, model.RowPanel) else ():
            number += 1
            inner.id_val = number
    return made


def _variables() -> list[Builder[model.VariableModel]]:
    """Returns the variables: data source, run, nodes of the run, window of averages."""
    source = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    run = build.QueryVariable("run").label("Run").datasource(DATASOURCE)
    run.query("label_values(penstock_step, run)").refresh(
        model.VariableRefresh.ON_TIME_RANGE_CHANGED
    )
    run.sort(model.VariableSort.ALPHABETICAL_ASC)
    node = build.QueryVariable("node").label("Nodes").datasource(DATASOURCE)
    node.query(f"label_values(penstock_build_info{{{RUN}}}, node)").multi(True).include_all(True)
    node.all_value(".*").refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    node.current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    node.sort(model.VariableSort.NATURAL_ASC)
    window = build.IntervalVariable("window").label("Averaged over").values(WINDOWS)
    window.auto(True).step_count(60).min_interval("1m")
    automatic = "$__auto_interval_window"
    window.current(model.VariableOption(selected=True, text="auto", value=automatic))
    window.description("Rates are averages over this time: let it hold several steps")
    return [source, run, node, window]


class _Mark(model.AnnotationQuery):
    """An annotation with ``titleFormat``, a field of the data source that the types lack."""

    words: str = ""

    def to_json(self) -> dict[str, object]:
        """Returns the JSON, with ``words`` as the title of the mark."""
        return {**super().to_json(), "titleFormat": self.words}


class _Marks(Builder[model.AnnotationQuery]):
    """Builds a mark; ``words`` may name labels, ``{{cause}}``."""

    def __init__(self, name: str, color: str, expr: str, words: str) -> None:
        self._made = _Mark(name=name, datasource=DATASOURCE, enable=True, icon_color=color)
        self._made.expr = expr
        self._made.words = words

    def build(self) -> model.AnnotationQuery:
        """Returns the mark."""
        return self._made


def _annotations() -> list[Builder[model.AnnotationQuery]]:
    """Returns the marks of events in all panels over time."""
    broken = f"sum by (cause) (increase(penstock_attempts_broken_total{{{RUN}}}[{WINDOW}])) > 0"
    saved = f"changes(penstock_saved_step{{{RUN}}}[{WINDOW}]) > 0"
    firing = f'ALERTS{{{RUN}, alertstate="firing", alertname!="PenstockWatchdog"}}'
    return [
        _Marks("Broken attempts", "red", broken, "Attempt broken: {{cause}}"),
        _Marks("Saves", "blue", saved, "Saved"),
        _Marks("Alerts", "orange", firing, "{{alertname}} {{node}} {{process}}"),
    ]
