"""PNG, by matplotlib, which is imported only here and only when a PNG is made."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.planner.render.chart import Caption, chart
from penstock.planner.render.drawing import Anchor, Drawing, LineSegment, Rectangle, Text
from penstock.planner.render.lanes import Picturable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 144
_PIXELS_PER_INCH = 96.0
_MAX_PIXELS = 30_000
"""Of a side: the largest that the Agg backend draws is 65535."""
_POINTS_PER_PIXEL = 72.0 / _PIXELS_PER_INCH
_ALIGNMENT = {Anchor.START: "left", Anchor.MIDDLE: "center", Anchor.END: "right"}


def png(simulation: Picturable, caption: Caption | None = None) -> bytes:
    """The chart of a simulation (:func:`penstock.planner.render.chart.chart`) as a PNG file."""
    return png_of(chart(simulation, caption))


def png_of(drawing: Drawing) -> bytes:
    """A drawing as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (drawing.width / _PIXELS_PER_INCH, drawing.height / _PIXELS_PER_INCH)
    dpi = min(_DPI, _MAX_PIXELS / max(size))
    figure = Figure(figsize=size, dpi=dpi)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0.0, drawing.width)
    axes.set_ylim(drawing.height, 0.0)
    _paint(axes, drawing)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "penstock"})
    return buffer.getvalue()


def _paint(axes: Axes, drawing: Drawing) -> None:
    """Collections, one for each look: thousands of single patches would take many seconds."""
    rectangles = [s for s in drawing.shapes if isinstance(s, Rectangle)]
    lines = [s for s in drawing.shapes if isinstance(s, LineSegment)]
    _paint_lines(axes, [line for line in lines if not line.dashed], order=1)
    _paint_rectangles(axes, [r for r in rectangles if r.hatched], order=2)
    _paint_rectangles(axes, [r for r in rectangles if not r.hatched and not r.outlined], order=3)
    _paint_rectangles(axes, [r for r in rectangles if r.outlined], order=3)
    _paint_lines(axes, [line for line in lines if line.dashed], order=4)
    for shape in drawing.shapes:
        if isinstance(shape, Text) and shape.text:
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size * _POINTS_PER_PIXEL,
                color=shape.colour,
                fontweight="bold" if shape.bold else "normal",
                horizontalalignment=_ALIGNMENT[shape.anchor],
                verticalalignment="center_baseline",
                zorder=5,
                parse_math=False,
            )


def _paint_rectangles(axes: Axes, rectangles: Sequence[Rectangle], *, order: int) -> None:
    from matplotlib.collections import PolyCollection

    if not rectangles:
        return
    first = rectangles[0]
    corners = [
        ((r.x, r.y), (r.x + r.width, r.y), (r.x + r.width, r.y + r.height), (r.x, r.y + r.height))
        for r in rectangles
    ]
    edge = "#cfd6dd" if first.hatched else "white"
    collection = PolyCollection(
        corners,
        facecolors=[r.fill for r in rectangles],
        edgecolors=edge if first.hatched or first.outlined else "none",
        linewidths=0.0 if first.hatched else 0.8,
        zorder=order,
    )
    if first.hatched:
        collection.set_hatch("////")
    axes.add_collection(collection, autolim=False)


def _paint_lines(axes: Axes, lines: Sequence[LineSegment], *, order: int) -> None:
    from matplotlib.collections import LineCollection

    if not lines:
        return
    collection = LineCollection(
        [((line.x1, line.y1), (line.x2, line.y2)) for line in lines],
        colors=[line.colour for line in lines],
        linewidths=0.8,
        linestyles="dashed" if lines[0].dashed else "solid",
        zorder=order,
    )
    axes.add_collection(collection, autolim=False)
