"""Panels in the looks that all dashboards share, with a title, an explanation, a unit and queries.

What they look like is decided here once: a colour for each resource, cause and decision, legends,
line widths. Sizes are in Grafana's grid, which is 24 columns wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from penstock.grafana.dashboards.queries import Query

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
MINUTE_S, HOUR_S = 60, 3600

Steps = Sequence[tuple[float | None, str]]
"""Thresholds: from a value on (None: from the start) a colour."""

GOOD_BELOW_ONE: Steps = ((None, "green"), (1, "red"))


class _Panel(Protocol):
    """What the builders of all kinds of panels have."""

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
    def color_scheme(self, color: Builder[model.FieldColor]) -> Self: ...
    def with_target(self, target: Builder[Any]) -> Self: ...
    def override_by_name(self, name: str, properties: list[model.DynamicConfigValue]) -> Self: ...


P = TypeVar("P", bound=_Panel)


def _dressed(
    panel: P,
    title: str,
    why: str,
    queries: Sequence[Query],
    *,
    unit: str,
    size: tuple[int, int],
    empty: str,
    limits: tuple[float | None, float | None] = (None, None),
    steps: Steps = (),
    names: Mapping[float, tuple[str, str]] | None = None,
    decimals: int | None = None,
) -> P:
    """Gives a panel what all kinds have. ``empty`` is shown where a query has no answer; ``names``
    are text and colour in place of a value.
    """
    width, height = size
    panel.title(title).description(why).datasource(DATASOURCE).unit(unit)
    panel.span(width).height(height)
    if empty:
        panel.no_value(empty)
    if limits[0] is not None:
        panel.min(limits[0])
    if limits[1] is not None:
        panel.max(limits[1])
    if decimals is not None:
        panel.decimals(decimals)
    if steps:
        panel.thresholds(thresholds(steps))
    if names:
        panel.mappings([value_names(names)])
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(_target(query, letter))
    return panel


def _target(query: Query, letter: str) -> source.Dataquery:
    target = source.Dataquery().expr(query.expr).ref_id(letter)
    target.datasource(DATASOURCE).editor_mode(source_model.QueryEditorMode.CODE)
    target.legend_format(query.legend or "__auto")
    if query.heatmap:
        return target.range().format(source_model.PromQueryFormat.HEATMAP)
    target.format(source_model.PromQueryFormat.TIME_SERIES)
    return target.instant() if query.instant else target.range()


def thresholds(steps: Steps) -> build.ThresholdsConfig:
    """Returns thresholds in values of the panel's unit."""
    made = [model.Threshold(value=value, color=color) for value, color in steps]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(made)


def value_names(names: Mapping[float, tuple[str, str]]) -> model.ValueMap:
    """Returns texts and colours in place of values."""
    return model.ValueMap(
        options={
            f"{value:g}": model.ValueMappingResult(text=text_, color=color, index=index)
            for index, (value, (text_, color)) in enumerate(names.items())
        }
    )


def _by_mode(mode: model.FieldColorModeId) -> build.FieldColor:
    return build.FieldColor().mode(mode)


def _colored(panel: P, names: Sequence[str]) -> P:
    """Gives series of these names the colours that they have in all dashboards."""
    for name in names:
        fixed = {"mode": "fixed", "fixedColor": COLORS[name]}
        panel.override_by_name(name, [model.DynamicConfigValue(id_val="color", value=fixed)])
    return panel


def lines(
    title: str,
    why: str,
    *queries: Query,
    unit: str,
    size: tuple[int, int] = (8, 8),
    empty: str = "",
    limits: tuple[float | None, float | None] = (None, None),
    steps: Steps = (),
    logarithmic: bool = False,
    gaps: bool = True,
    colors: Sequence[str] = (),
    limits_named: Sequence[str] = (),
) -> timeseries.Panel:
    """Returns lines over time. Series in ``limits_named`` are dashed: what the others are held
    against. Without ``gaps`` points are joined however far apart they are.
    """
    panel = timeseries.Panel().line_width(1.5).fill_opacity(8)
    panel = _dressed(
        panel, title, why, queries, unit=unit, size=size, empty=empty, limits=limits, steps=steps
    )
    panel.show_points(looks.VisibilityMode.AUTO).legend(_legend())
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(looks.TooltipDisplayMode.MULTI)
        .sort(looks.SortOrder.DESCENDING)
    )
    if not gaps:
        panel.span_nulls(True)
    if logarithmic:
        kind = looks.ScaleDistribution.LOG
        panel.scale_distribution(common.ScaleDistributionConfig().type(kind).log(10))
    if steps:
        style = common.GraphThresholdsStyleConfig().mode(looks.GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(style)
    for name in limits_named:
        dashes = {"fill": "dash", "dash": [8, 6]}
        panel.override_by_name(
            name,
            [
                model.DynamicConfigValue(id_val="custom.lineStyle", value=dashes),
                model.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
                model.DynamicConfigValue(
                    id_val="color", value={"mode": "fixed", "fixedColor": "semi-dark-red"}
                ),
            ],
        )
    return _colored(panel, colors)


def stacked(
    title: str,
    why: str,
    *queries: Query,
    unit: str,
    size: tuple[int, int] = (8, 8),
    empty: str = "",
    limits: tuple[float | None, float | None] = (0, None),
    gaps: bool = True,
    bars: bool = False,
    colors: Sequence[str] = (),
) -> timeseries.Panel:
    """Returns areas (or bars) over time, one on top of the other: parts of a whole."""
    panel = lines(
        title,
        why,
        *queries,
        unit=unit,
        size=size,
        empty=empty,
        limits=limits,
        gaps=gaps,
        colors=colors,
    )
    panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL).group("A"))
    panel.fill_opacity(70).line_width(0)
    if bars:
        panel.draw_style(looks.GraphDrawStyle.BARS)
    return panel


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).calcs(["lastNotNull"])
    legend.display_mode(looks.LegendDisplayMode.LIST)
    return legend.placement(looks.LegendPlacement.BOTTOM)


def number(
    title: str,
    why: str,
    query: Query,
    *,
    unit: str,
    size: tuple[int, int] = (3, 4),
    empty: str = "",
    steps: Steps = ((None, "text"),),
    names: Mapping[float, tuple[str, str]] | None = None,
    text_mode: looks.BigValueTextMode = looks.BigValueTextMode.VALUE,
    decimals: int | None = None,
) -> stat.Panel:
    """Returns one big number, over its course where the query is not an instant one."""
    panel = _dressed(
        stat.Panel(),
        title,
        why,
        [query],
        unit=unit,
        size=size,
        empty=empty,
        steps=steps,
        names=names,
        decimals=decimals,
    )
    graph = looks.BigValueGraphMode.NONE if query.instant else looks.BigValueGraphMode.AREA
    panel.graph_mode(graph).color_mode(looks.BigValueColorMode.VALUE).text_mode(text_mode)
    return panel.reduce_options(_newest())


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")


def dial(
    title: str,
    why: str,
    query: Query,
    *,
    size: tuple[int, int] = (4, 6),
    empty: str = "",
    steps: Steps,
) -> gauge.Panel:
    """Returns dials from nothing to all of something."""
    panel = _dressed(
        gauge.Panel(),
        title,
        why,
        [query],
        unit="percentunit",
        size=size,
        empty=empty,
        limits=(0, 1),
        steps=steps,
    )
    return panel.show_threshold_markers(True).reduce_options(_newest())


def bars(
    title: str,
    why: str,
    *queries: Query,
    unit: str,
    size: tuple[int, int] = (6, 8),
    empty: str = "",
    limits: tuple[float | None, float | None] = (0, None),
    steps: Steps = ((None, "blue"),),
    colors: Sequence[str] = (),
) -> bargauge.Panel:
    """Returns one horizontal bar a series: its newest value."""
    panel = _dressed(
        bargauge.Panel(),
        title,
        why,
        queries,
        unit=unit,
        size=size,
        empty=empty,
        limits=limits,
        steps=steps,
    )
    panel.orientation(looks.VizOrientation.HORIZONTAL).reduce_options(_newest())
    panel.display_mode(looks.BarGaugeDisplayMode.BASIC)
    return _colored(panel, colors)


def states(
    title: str,
    why: str,
    *queries: Query,
    names: Mapping[float, tuple[str, str]],
    size: tuple[int, int] = (24, 8),
    empty: str = "",
) -> statetimeline.Panel:
    """Returns a lane for each series, in the colour of the state that its value stands for."""
    panel = _dressed(
        statetimeline.Panel(),
        title,
        why,
        queries,
        unit="none",
        size=size,
        empty=empty,
        names=names,
    )
    panel.merge_values(True).show_value(looks.VisibilityMode.AUTO).row_height(0.8)
    panel.fill_opacity(85).line_width(0).legend(_legend())
    # With other modes Grafana shades by the value and forgets the colours of the states.
    return panel.color_scheme(_by_mode(model.FieldColorModeId.THRESHOLDS))


def grid(
    title: str,
    why: str,
    query: Query,
    *,
    columns: Mapping[str, str],
    unit: str = "none",
    size: tuple[int, int] = (12, 8),
    empty: str = "",
    decimals: int | None = None,
) -> table.Panel:
    """Returns a table of an instant query's series. ``columns``: the labels that are shown, in
    order, and their headings; ``Value`` is the value.
    """
    panel = _dressed(
        table.Panel(), title, why, [], unit=unit, size=size, empty=empty, decimals=decimals
    )
    # One row a series, and a column a label; other panels want series, which have names.
    panel.with_target(_target(query, "A").format(source_model.PromQueryFormat.TABLE))
    shown = {name: index for index, name in enumerate(columns)}
    chosen = {"include": {"names": list(columns)}}
    panel.with_transformation(
        model.DataTransformerConfig(id_val="filterFieldsByName", options=chosen)
    )
    order = {"indexByName": shown, "renameByName": dict(columns), "excludeByName": {}}
    return panel.with_transformation(model.DataTransformerConfig(id_val="organize", options=order))


def spread(
    title: str, why: str, query: Query, *, unit: str, size: tuple[int, int] = (8, 8), empty: str
) -> heatmap.Panel:
    """Returns a histogram's buckets over time: the darker, the more fell into one."""
    panel = heatmap.Panel().title(title).description(why).datasource(DATASOURCE)
    panel.span(size[0]).height(size[1]).no_value(empty).calculate(False)
    panel.with_target(_target(query, "A")).y_axis(heatmap.YAxisConfig().unit(unit))
    palette = heatmap.HeatmapColorOptions().mode(heatmap_looks.HeatmapColorMode.SCHEME)
    return panel.color(palette.scheme("Oranges").steps(32)).show_y_histogram()


def words(title: str, content: str, *, size: tuple[int, int]) -> text.Panel:
    """Returns a text in Markdown."""
    panel = text.Panel().title(title).content(content).mode(text_model.TextMode.MARKDOWN)
    return panel.span(size[0]).height(size[1]).transparent(True)
