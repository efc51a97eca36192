"""Panels in the style of all dashboards: a value :class:`Panel`, and one builder for each kind.

Builders decide the style once: a colour for each resource, cause and decision, legends, line
widths. Sizes are cells of Grafana's grid, which has 24 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    gauge,
    heatmap,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus as source
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_looks
from grafana_foundation_sdk.models import prometheus as source_model
from grafana_foundation_sdk.models import text as text_model

from penstock.grafana.dashboards.colors import COLORS

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query in PromQL. ``legend`` names a series by its labels, ``{{device}}``.

    ``mode``: "each" asks for the time range shown, "last" for the end of the range, "heatmap" for
    the buckets of a histogram.
    """

    expr: str
    legend: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel. ``why`` is its explanation, or the Markdown text of ``words``.

    ``empty`` replaces an empty answer. ``limits`` are the ends of the axis. ``steps`` are
    thresholds: the colour from a value on, None for the start. ``names`` replace a value by a text
    and a colour. ``colors`` name series with a fixed colour. Series in ``limits_named`` are drawn
    dashed. ``gaps: false`` joins distant points. ``columns`` are labels and their headings.
    """

    title: str
    why: str
    queries: tuple[Query, ...] = ()
    unit: str = "none"
    size: tuple[int, int]
    empty: str = ""
    limits: tuple[float | None, float | None] = (None, None)
    steps: Sequence[tuple[float | None, str]] = ()
    names: Mapping[float, tuple[str, str]] = field(default_factory=dict)
    decimals: int | None = None
    colors: Sequence[str] = ()
    limits_named: Sequence[str] = ()
    logarithmic: bool = False
    gaps: bool = True
    bars: bool = False
    text_mode: str = "value"
    columns: Mapping[str, str] = field(default_factory=dict)


class _Builder(Protocol):
    """Methods of the builders of all kinds of panels."""

    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: model.DataSourceRef) -> Self: ...
    def height(self, h: int) -> Self: ...
    def span(self, w: int) -> Self: ...
    def unit(self, unit: str) -> Self: ...
    def decimals(self, decimals: float) -> Self: ...
    def no_value(self, no_value: str) -> Self: ...
    def min(self, min_val: float) -> Self: ...
    def max(self, max_val: float) -> Self: ...
    def thresholds(self, thresholds: Builder[model.ThresholdsConfig]) -> Self: ...
    def mappings(self, mappings: list[model.ValueMapping]) -> Self: ...
    def with_target(self, target: Builder[Any]) -> Self: ...
    def override_by_name(self, name: str, properties: list[model.DynamicConfigValue]) -> Self: ...


B = TypeVar("B", bound=_Builder)


def _dressed(builder: B, panel: Panel) -> B:
    """Sets the properties that all kinds share."""
    builder.title(panel.title).description(panel.why).datasource(DATASOURCE).unit(panel.unit)
    builder.span(panel.size[0]).height(panel.size[1])
    least, most = panel.limits
    if panel.empty:
        builder.no_value(panel.empty)
    if least is not None:
        builder.min(least)
    if most is not None:
        builder.max(most)
    if panel.decimals is not None:
        builder.decimals(panel.decimals)
    if panel.steps:
        steps = [model.Threshold(value=value, color=color) for value, color in panel.steps]
        mode = model.ThresholdsMode.ABSOLUTE
        builder.thresholds(build.ThresholdsConfig().mode(mode).steps(steps))
    if panel.names:
        options = {
            f"{value:g}": model.ValueMappingResult(text=name, color=color, index=index)
            for index, (value, (name, color)) in enumerate(panel.names.items())
        }
        builder.mappings([model.ValueMap(options=options)])
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        builder.with_target(_target(query, letter))
    for name in panel.limits_named:
        dashes = {"fill": "dash", "dash": [8, 6]}
        color = {"mode": "fixed", "fixedColor": "semi-dark-red"}
        looks_of = {"custom.lineStyle": dashes, "custom.fillOpacity": 0, "color": color}
        builder.override_by_name(name, _properties(looks_of))
    for name in panel.colors:
        color = {"mode": "fixed", "fixedColor": COLORS[name]}
        builder.override_by_name(name, _properties({"color": color}))
    return builder


def _properties(values: Mapping[str, object]) -> list[model.DynamicConfigValue]:
    return [model.DynamicConfigValue(id_val=name, value=value) for name, value in values.items()]


def _target(query: Query, letter: str) -> source.Dataquery:
    target = source.Dataquery().expr(query.expr).ref_id(letter)
    target.datasource(DATASOURCE).editor_mode(source_model.QueryEditorMode.CODE)
    target.legend_format(query.legend or "__auto")
    if query.mode == "heatmap":
        return target.range().format(source_model.PromQueryFormat.HEATMAP)
    target.format(source_model.PromQueryFormat.TIME_SERIES)
    return target.instant() if query.mode == "last" else target.range()


def _lines(panel: Panel) -> timeseries.Panel:
    """Returns lines over time."""
    made = _dressed(timeseries.Panel().line_width(1.5).fill_opacity(8), panel)
    made.show_points(looks.VisibilityMode.AUTO).legend(_legend())
    made.tooltip(
        common.VizTooltipOptions()
        .mode(looks.TooltipDisplayMode.MULTI)
        .sort(looks.SortOrder.DESCENDING)
    )
    if not panel.gaps:
        made.span_nulls(True)
    if panel.logarithmic:
        kind = looks.ScaleDistribution.LOG
        made.scale_distribution(common.ScaleDistributionConfig().type(kind).log(10))
    if panel.steps:
        dashed = looks.GraphThresholdsStyleMode.DASHED
        made.thresholds_style(common.GraphThresholdsStyleConfig().mode(dashed))
    return made


def _stacked(panel: Panel) -> timeseries.Panel:
    """Returns stacked areas (or bars) over time: parts of a whole."""
    made = _lines(panel)
    made.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    made.fill_opacity(70).line_width(0)
    return made.draw_style(looks.GraphDrawStyle.BARS) if panel.bars else made


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).calcs(["lastNotNull"])
    legend.display_mode(looks.LegendDisplayMode.LIST)
    return legend.placement(looks.LegendPlacement.BOTTOM)


def _number(panel: Panel) -> stat.Panel:
    """Returns one large number, above its course unless the query asks for the last value."""
    made = _dressed(stat.Panel(), panel)
    instant = panel.queries[0].mode == "last"
    made.graph_mode(looks.BigValueGraphMode.NONE if instant else looks.BigValueGraphMode.AREA)
    made.text_mode(looks.BigValueTextMode(panel.text_mode))
    return made.color_mode(looks.BigValueColorMode.VALUE).reduce_options(_newest())


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")


def _dial(panel: Panel) -> gauge.Panel:
    """Returns dials from 0 to 100 %."""
    return _dressed(gauge.Panel(), panel).show_threshold_markers(True).reduce_options(_newest())


def _bars(panel: Panel) -> bargauge.Panel:
    """Returns a horizontal bar for the newest value of each series."""
    made = _dressed(bargauge.Panel(), panel)
    made.orientation(looks.VizOrientation.HORIZONTAL).reduce_options(_newest())
    return made.display_mode(looks.BarGaugeDisplayMode.BASIC)


def _states(panel: Panel) -> statetimeline.Panel:
    """Returns a lane for each series, in the colour of the state that the value names."""
    made = _dressed(statetimeline.Panel(), panel)
    made.merge_values(True).show_value(looks.VisibilityMode.AUTO).row_height(0.8)
    made.fill_opacity(85).line_width(0).legend(_legend())
    # With other modes Grafana shades by the value and ignores the colours of the states.
    return made.color_scheme(build.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))


def _grid(panel: Panel) -> table.Panel:
    """Returns a table of the last values, with a column for each label in ``columns``."""
    [query] = panel.queries
    made = _dressed(table.Panel(), replace(panel, queries=()))
    # The table format has one row a series and one column a label.
    made.with_target(_target(query, "A").format(source_model.PromQueryFormat.TABLE))
    chosen = {"include": {"names": list(panel.columns)}}
    order = {
        "indexByName": {name: index for index, name in enumerate(panel.columns)},
        "renameByName": dict(panel.columns),
        "excludeByName": {},
    }
    for name, options in (("filterFieldsByName", chosen), ("organize", order)):
        made.with_transformation(model.DataTransformerConfig(id_val=name, options=options))
    return made


def _spread(panel: Panel) -> heatmap.Panel:
    """Returns the buckets of a histogram over time; darker means more values."""
    made = heatmap.Panel().title(panel.title).description(panel.why).datasource(DATASOURCE)
    made.span(panel.size[0]).height(panel.size[1]).no_value(panel.empty).calculate(False)
    made.with_target(_target(panel.queries[0], "A"))
    palette = heatmap.HeatmapColorOptions().mode(heatmap_looks.HeatmapColorMode.SCHEME)
    made.color(palette.scheme("Oranges").steps(32)).show_y_histogram()
    return made.y_axis(heatmap.YAxisConfig().unit(panel.unit))


def _words(panel: Panel) -> text.Panel:
    """Returns a text in Markdown."""
    made = text.Panel().title(panel.title).content(panel.why)
    made.mode(text_model.TextMode.MARKDOWN).transparent(True)
    return made.span(panel.size[0]).height(panel.size[1])


BUILDERS: Mapping[str, Callable[[Panel], Builder[Any]]] = {
    "lines": _lines,
    "stacked": _stacked,
    "number": _number,
    "dial": _dial,
    "bars": _bars,
    "states": _states,
    "grid": _grid,
    "spread": _spread,
    "words": _words,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "lines": {"size": (8, 8)},
    "stacked": {"size": (8, 8), "limits": (0, None)},
    "number": {"size": (3, 4), "steps": ((None, "text"),)},
    "dial": {"size": (4, 6), "unit": "percentunit", "limits": (0, 1)},
    "bars": {"size": (6, 8), "limits": (0, None), "steps": ((None, "blue"),)},
    "states": {"size": (24, 8)},
    "grid": {"size": (12, 8)},
    "spread": {"size": (8, 8)},
    "words": {},
}
"""Options of each kind of panel, unless its table sets others."""
