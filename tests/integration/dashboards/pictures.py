"""Pictures of the dashboards, drawn from Prometheus' answers in Grafana's layout and colours.

They show what the dashboards have to say, and not how Grafana draws: no Grafana was at hand.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Wedge
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

from tests.grafana.reading import Panel
from tests.integration.dashboards.answers import Answer, Line
from tests.integration.dashboards.units import written

WIDTH_IN, ROW_IN, DPI, COLUMNS = 17.0, 0.36, 72, 24
PAGE, PANEL, INK, FAINT = "#111217", "#181b1f", "#ccccdc", "#6e7077"
PALETTE = ("#7EB26D", "#EAB839", "#6ED0E0", "#EF843C", "#E24D42", "#1F78C1", "#BA43A9", "#705DA0")
NAMED = {
    "green": "#73BF69",
    "blue": "#5794F2",
    "light-blue": "#8AB8FF",
    "super-light-blue": "#C0D8FF",
    "purple": "#B877D9",
    "dark-purple": "#8F3BB8",
    "orange": "#FF9830",
    "yellow": "#FADE2A",
    "red": "#F2495C",
    "light-red": "#FF7383",
    "semi-dark-red": "#E02F44",
    "dark-red": "#C4162A",
    "text": INK,
    "transparent": PANEL,
}


def draw(answers: Sequence[tuple[Panel, Answer | None]], path: Path) -> None:
    """Draw one dashboard's panels; those without an answer are empty."""
    times = [
        at_s for _, answer in answers if answer for line in answer.lines for at_s, _ in line.points
    ]
    shown = (min(times), max(times))
    tops = {panel.section: panel.place[1] for panel, _ in reversed(answers)}
    rows = max(panel.place[1] + panel.place[3] for panel, _ in answers)
    height_in = rows * ROW_IN
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor=PAGE, dpi=DPI)
    FigureCanvasAgg(figure)
    for section, top in tops.items():
        at = 1.0 - (top - 0.45) / rows
        figure.text(0.006, at, f"▾ {section}", color=INK, size=11, weight="bold", va="center")
    for panel, answer in answers:
        _draw_panel(figure, panel, answer, rows, shown)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    # Few colours: a quarter of the bytes.
    image = Image.open(buffer).convert("RGB").quantize(colors=64)
    image.save(path, optimize=True)


def _draw_panel(
    figure: Figure, panel: Panel, answer: Answer | None, rows: int, shown: tuple[float, float]
) -> None:
    x, y, width, height = panel.place
    gap_x, gap_y = 0.0035, 0.07 / rows
    left, bottom = x / COLUMNS + gap_x, 1.0 - (y + height) / rows + gap_y
    size = (width / COLUMNS - 2 * gap_x, height / rows - 2 * gap_y)
    frame = figure.add_axes((left, bottom, *size), facecolor=PANEL)
    frame.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    for spine in frame.spines.values():
        spine.set_color("#25272c")
    title = 1.0 - 0.55 / height
    frame.text(0.008 * 24 / width, title, panel.title, color=INK, size=9.5, va="center")
    if panel.kind == "text":
        content = panel.raw["options"]["content"].replace("**", "")
        lines = textwrap.fill(content, int(width * 9.5))
        frame.text(0.01, title - 0.7 / height, lines, color=INK, size=8, va="top")
        return
    if answer is None or not answer.lines:
        nothing = panel.raw.get("fieldConfig", {}).get("defaults", {}).get("noValue", "No data")
        frame.text(0.5, 0.45, nothing, color=FAINT, size=11, ha="center", va="center")
        return
    kind = {
        "timeseries": _timeseries,
        "stat": _stat,
        "gauge": _gauge,
        "bargauge": _bars,
        "state-timeline": _states,
        "table": _table,
        "heatmap": _heatmap,
    }[panel.kind]
    # Inside of the frame: room for the title, axes and legend.
    legend = 1.0 / rows if panel.kind in ("timeseries", "state-timeline") else 0.15 / rows
    room = (left + 0.6 / COLUMNS, bottom + legend, size[0] - 0.8 / COLUMNS)
    inner = figure.add_axes((*room, size[1] - legend - 1.0 / rows), facecolor=PANEL)
    inner.tick_params(colors=FAINT, labelsize=7, length=2)
    for spine in inner.spines.values():
        spine.set_visible(False)
    kind(inner, frame, panel, answer)
    if panel.kind in ("timeseries", "state-timeline", "heatmap"):
        inner.set_xlim(*shown)
        since = FuncFormatter(lambda at_s, _: f"{at_s - shown[0]:.0f} s")
        inner.xaxis.set_major_formatter(since)
        inner.xaxis.set_major_locator(MultipleLocator(_tick_s(shown), shown[0]))


def _tick_s(shown: tuple[float, float]) -> float:
    """A round number of seconds, some five of which are the time shown."""
    return next(
        tick for tick in (5.0, 10.0, 20.0, 30.0, 60.0, 300.0) if shown[1] - shown[0] < 7 * tick
    )


def _color(panel: Panel, line: Line, index: int) -> str:
    for override in panel.raw.get("fieldConfig", {}).get("overrides", ()):
        if override["matcher"]["options"] == line.name:
            for entry in override["properties"]:
                if entry["id"] == "color":
                    return _named(entry["value"]["fixedColor"])
    return PALETTE[index % len(PALETTE)]


def _named(color: str) -> str:
    return NAMED.get(color, color)


def _is_limit(panel: Panel, line: Line) -> bool:
    overrides = panel.raw["fieldConfig"].get("overrides", ())
    return any(
        override["matcher"]["options"] == line.name and entry["id"] == "custom.lineStyle"
        for override in overrides
        for entry in override["properties"]
    )


def _custom(panel: Panel) -> Mapping[str, Any]:
    found: Mapping[str, Any] = panel.raw["fieldConfig"]["defaults"].get("custom", {})
    return found


def _timeseries(axes: Axes, frame: Axes, panel: Panel, answer: Answer) -> None:
    stacked = _custom(panel).get("stacking", {}).get("mode") == "normal"
    lines = answer.lines
    if stacked:
        times = np.array(sorted({at_s for line in lines for at_s, _ in line.points}))
        heights = [np.interp(times, *np.array(line.points).T) for line in lines]
        colors = [_color(panel, line, index) for index, line in enumerate(lines)]
        axes.stackplot(times, heights, colors=colors, alpha=0.75)
    else:
        for index, line in enumerate(lines):
            times, values = np.array(line.points).T
            style = "--" if _is_limit(panel, line) else "-"
            color = _color(panel, line, index)
            marker = "." if len(values) < 20 else ""
            axes.plot(times, values, style + marker, color=color, lw=1.1, ms=3)
    if _custom(panel).get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
    elif panel.raw["fieldConfig"]["defaults"].get("min") == 0:
        axes.set_ylim(0, axes.get_ylim()[1] or 1.0)
    axes.grid(color="#25272c", lw=0.6)
    axes.set_axisbelow(True)
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if panel.unit == "none":
            axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    if panel.unit != "none":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, panel.unit)))
    _legend(frame, panel, lines)


def _legend(frame: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    width, height = panel.place[2:]
    at, most = 0.012, 0.97
    for index, line in enumerate(lines):
        text = f"▬ {line.name} {written(line.values[-1], panel.unit)}"
        share = (len(text) + 2) * 0.0036 * COLUMNS / width
        if at + share > most:
            frame.text(at, 0.45 / height, "…", color=FAINT, size=7.5)
            return
        color = _color(panel, line, index)
        frame.text(at, 0.4 / height, text, color=color, size=7.5, va="center")
        at += share


def _stat(axes: Axes, frame: Axes, panel: Panel, answer: Answer) -> None:
    line = answer.lines[0]
    times, values = np.array(line.points).T
    if len(values) > 1:
        low = min(values.min(), 0.0)
        axes.fill_between(times, values, low, color="#73BF69", alpha=0.25, lw=0)
        axes.set_ylim(low, (values.max() or 1.0) * 2.5)
    axes.set_axis_off()
    mode = panel.raw["options"].get("textMode", "value")
    shown = written(line.values[-1], panel.unit, panel.decimals)
    text = {"name": line.name, "value": shown, "value_and_name": f"{line.name}\n{shown}"}[mode]
    size = 17 if len(text) < 9 else 13
    color = _named(_step_color(panel, line.values[-1]))
    frame.text(0.5, 0.45, text, color=color, size=size, ha="center", va="center", weight="bold")


def _step_color(panel: Panel, value: float) -> str:
    steps = panel.raw["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ())
    chosen = "green"
    for step in steps:
        if step["value"] is None or value >= step["value"]:
            chosen = step["color"]
    return str(chosen)


def _gauge(axes: Axes, frame: Axes, panel: Panel, answer: Answer) -> None:
    axes.set_axis_off()
    count = len(answer.lines)
    axes.set(xlim=(0, 2.6 * count), ylim=(-0.6, 1.1), aspect="equal")
    for index, line in enumerate(answer.lines):
        middle, value = (2.6 * index + 1.3, 0.0), line.values[-1]
        axes.add_patch(Wedge(middle, 1.0, 0, 180, width=0.25, color="#2c2f35"))
        end = 180 * (1 - min(max(value, 0.0), 1.0))
        color = _named(_step_color(panel, value))
        axes.add_patch(Wedge(middle, 1.0, end, 180, width=0.25, color=color))
        text = written(value, panel.unit)
        axes.text(*middle, text, color=color, ha="center", size=12, weight="bold")
        axes.text(middle[0], -0.4, line.name, color=INK, ha="center", size=8)


def _bars(axes: Axes, frame: Axes, panel: Panel, answer: Answer) -> None:
    lines = answer.lines[::-1]
    greatest = max(abs(line.values[-1]) for line in lines) or 1.0
    limit = panel.raw["fieldConfig"]["defaults"].get("max") or greatest
    for index, line in enumerate(lines):
        value = line.values[-1]
        chosen = any(
            override["matcher"]["options"] == line.name
            for override in panel.raw["fieldConfig"].get("overrides", ())
        )
        color = _color(panel, line, 0) if chosen else _named(_step_color(panel, value))
        axes.barh(index, 1.0, color="#22252b", height=0.7)
        axes.barh(index, value / limit, color=color, height=0.7)
        text = written(value, panel.unit)
        axes.text(1.02, index, text, color=color, size=9, va="center")
        axes.text(-0.02, index, line.name, color=INK, size=8, va="center", ha="right")
    axes.set(xlim=(-0.45, 1.25), ylim=(-0.6, max(len(lines), 3) - 0.4))
    axes.set_axis_off()


def _states(axes: Axes, frame: Axes, panel: Panel, answer: Answer) -> None:
    names = panel.raw["fieldConfig"]["defaults"]["mappings"][0]["options"]
    lines = sorted(answer.lines, key=lambda line: line.name, reverse=True)
    step_s = min(
        (later[0] - sooner[0] for line in lines for sooner, later in _pairs(line.points)),
        default=1.0,
    )
    for index, line in enumerate(lines):
        for at_s, value in line.points:
            state = names.get(f"{value:g}", {"color": "text"})
            axes.broken_barh(
                [(at_s, 1.05 * step_s)], (index - 0.4, 0.8), color=_named(state["color"])
            )
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.tick_params(axis="y", labelsize=6.5, pad=-2, direction="in")
    for label in axes.get_yticklabels():
        label.set(
            ha="left", color="white", bbox={"fc": PANEL, "ec": "none", "pad": 0.5, "alpha": 0.5}
        )
    at, (width, height) = 0.012, panel.place[2:]
    seen = {f"{value:g}" for line in lines for value in line.values}
    for key, state in names.items():
        if key in seen and state["text"].strip():
            text = f"■ {state['text']}"
            frame.text(at, 0.4 / height, text, color=_named(state["color"]), size=7.5, va="center")
            at += (len(text) + 2) * 0.0036 * COLUMNS / width


def _pairs(points: Sequence[tuple[float, float]]) -> Sequence[tuple[Any, Any]]:
    return list(itertools.pairwise(points))


def _table(axes: Axes, frame: Axes, panel: Panel, answer: Answer) -> None:
    axes.set_axis_off()
    options = panel.raw["transformations"][1]["options"]
    order: dict[str, int] = options["indexByName"]
    columns = {
        label: options["renameByName"][label] for label in sorted(order, key=order.__getitem__)
    }
    height = panel.place[3]
    top = 1.0 - 1.3 / height
    for column, (label, heading) in enumerate(columns.items()):
        left = 0.015 + 0.97 * column / len(columns)
        frame.text(left, top, heading, color="#5794F2", size=8, weight="bold", va="center")
        for row, line in enumerate(answer.lines[: int((height - 2) / 0.75)]):
            value = written(line.values[-1], panel.unit, panel.decimals)
            text = value if label == "Value" else line.labels.get(label, "")
            at = top - 0.75 * (row + 1) / height
            frame.text(left, at, text[: int(150 / len(columns))], color=INK, size=8, va="center")


def _heatmap(axes: Axes, frame: Axes, panel: Panel, answer: Answer) -> None:
    lines = sorted(answer.lines, key=lambda line: float(line.labels["le"]))
    times = sorted({at_s for line in lines for at_s, _ in line.points})
    rates = np.array([np.interp(times, *np.array(line.points).T) for line in lines])
    counted = np.diff(rates, axis=0, prepend=np.zeros((1, len(times))))
    counted[counted <= 1e-9] = np.nan
    axes.pcolormesh(times, range(len(lines)), counted, cmap="YlOrBr_r", shading="nearest")
    labels = [line.labels["le"] for line in lines]
    axes.set_yticks(range(len(lines)), [f"{label} s" for label in labels])
