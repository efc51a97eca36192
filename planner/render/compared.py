"""Two time lines, one over the other, on the same time axis: what was measured over what was
simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.render.as_png import png_of
from penstock.planner.render.as_svg import svg_of
from penstock.planner.render.chart import (
    _CHART_WIDTH,
    _LABEL_WIDTH,
    _RIGHT_WIDTH,
    _TOP,
    Caption,
    Shape,
    _Chart,
)
from penstock.planner.render.colours import FAINT_INK, GRID
from penstock.planner.render.drawing import Anchor, Drawing, LineSegment, Text
from penstock.planner.render.lanes import Picturable

Panel = tuple[Picturable, Caption]

_BELOW = 30.0


def compared(upper: Panel, lower: Panel) -> Drawing:
    """Both charts; the axis is as long as the longer of the two."""
    axis_s = max(upper[0].makespan_s, lower[0].makespan_s)
    shapes: list[Shape] = []
    y = 0.0
    panels = [_Panel(simulation, caption, axis_s) for simulation, caption in (upper, lower)]
    for panel in panels:
        drawn, height = panel.body()
        shapes += (_lowered(shape, y) for shape in drawn)
        y += height
    legend, end = panels[1].legend_with(panels[0], y + 4.0)
    width = _LABEL_WIDTH + _CHART_WIDTH + _RIGHT_WIDTH
    return Drawing(width=width, height=end, shapes=(*shapes, *legend))


def compared_svg(upper: Panel, lower: Panel) -> str:
    """As a standalone SVG document."""
    return svg_of(compared(upper, lower))


def compared_png(upper: Panel, lower: Panel) -> bytes:
    """As a PNG file."""
    return png_of(compared(upper, lower))


class _Panel(_Chart):
    """A chart whose axis may be longer than its time line, without a legend of its own."""

    def __init__(self, simulation: Picturable, caption: Caption, axis_s: float) -> None:
        super().__init__(simulation, caption)
        self._axis_s = axis_s
        self._scale = _CHART_WIDTH / axis_s if axis_s > 0.0 else 0.0

    def body(self) -> tuple[list[Shape], float]:
        """Its shapes from 0 down, and its height."""
        rows, bottom = self._all_rows()
        shapes = [*self._title(), *self._axis(bottom), *rows, *self._marks(bottom)]
        return shapes, bottom + _BELOW

    def legend_with(self, other: _Panel, y: float) -> tuple[list[Shape], float]:
        """The legend of both."""
        self._rows = (*other._rows, *self._rows)
        return self._legend(y)

    def _axis(self, bottom: float) -> Iterator[Shape]:
        for time_s, text in self._caption.unit.ticks(self._axis_s, at_most=16):
            x = self._x(time_s)
            yield LineSegment(x1=x, y1=_TOP - 4.0, x2=x, y2=bottom + 4.0, colour=GRID)
            yield Text(x=x, y=bottom + 14.0, text=text, anchor=Anchor.MIDDLE, colour=FAINT_INK)


def _lowered(shape: Shape, by: float) -> Shape:
    if isinstance(shape, LineSegment):
        return replace(shape, y1=shape.y1 + by, y2=shape.y2 + by)
    return replace(shape, y=shape.y + by)
