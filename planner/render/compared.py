"""Two time lines, one over the other, on the same time axis: what was measured over what was
simulated.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.render.as_png import (
    _DPI,
    _MAX_PIXELS,
    _PIXELS_PER_INCH,
    _paint,
)
from penstock.planner.render.as_svg import _HATCH, _element, _number
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
from penstock.planner.render.drawing import Anchor, Drawing, Line, Text
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
    drawing = compared(upper, lower)
    width, height = _number(drawing.width), _number(drawing.height)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
            _HATCH,
            '<rect width="100%" height="100%" fill="white"/>',
            *(" ".join(_element(shape)) for shape in drawing.shapes),
            "</svg>\n",
        )
    )


def compared_png(upper: Panel, lower: Panel) -> bytes:
    """As a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = compared(upper, lower)
    size = (drawing.width / _PIXELS_PER_INCH, drawing.height / _PIXELS_PER_INCH)
    figure = Figure(figsize=size, dpi=min(_DPI, _MAX_PIXELS / max(size)))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0.0, drawing.width)
    axes.set_ylim(drawing.height, 0.0)
    _paint(axes, drawing)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "penstock"})
    return buffer.getvalue()


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
            yield Line(x1=x, y1=_TOP - 4.0, x2=x, y2=bottom + 4.0, colour=GRID)
            yield Text(x=x, y=bottom + 14.0, text=text, anchor=Anchor.MIDDLE, colour=FAINT_INK)


def _lowered(shape: Shape, by: float) -> Shape:
    if isinstance(shape, Line):
        return replace(shape, y1=shape.y1 + by, y2=shape.y2 + by)
    return replace(shape, y=shape.y + by)
