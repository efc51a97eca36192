"""Writes drawings as SVG, in which a mouse that points at a box shows its title, and as PNG.

Only PNGs need matplotlib, which is imported when the first one is made.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from penstock.planner.render.chart import WIDE, Caption, Columns, Panel, chart, compared
from penstock.planner.render.drawing import Anchor, Drawing, LineSegment, Rectangle, Text
from penstock.planner.render.lanes import Picturable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><rect width="6" height="6" fill="#f1f3f5"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#cfd6dd" stroke-width="2"/></pattern></defs>'
)
_DPI = 144
_PIXELS_PER_INCH = 96.0
_MAX_PIXELS = 30_000
"""No side is longer: the largest picture that the Agg backend draws has 65535 pixels."""
_POINTS_PER_PIXEL = 72.0 / _PIXELS_PER_INCH
_ALIGNMENT = {Anchor.START: "left", Anchor.MIDDLE: "center", Anchor.END: "right"}


def svg(simulation: Picturable, caption: Caption | None = None) -> str:
    """Returns the chart of a simulation (:func:`penstock.planner.render.chart.chart`) as an SVG
    document.
    """
    return svg_of(chart(simulation, caption))


def png(simulation: Picturable, caption: Caption | None = None) -> bytes:
    """Returns the chart of a simulation (:func:`penstock.planner.render.chart.chart`) as a PNG
    file.
    """
    return png_of(chart(simulation, caption))


def compared_svg(upper: Panel, lower: Panel, columns: Columns = WIDE) -> str:
    """Returns two time lines, one over the other on one axis, as an SVG document."""
    return svg_of(compared(upper, lower, columns))


def compared_png(upper: Panel, lower: Panel) -> bytes:
    """Returns two time lines, one over the other on one axis, as a PNG file."""
    return png_of(compared(upper, lower))


def svg_of(drawing: Drawing) -> str:
    """Returns a drawing as a standalone SVG document."""
    width, height = _number(drawing.width), _number(drawing.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
        _HATCH,
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for shape in drawing.shapes:
        lines.append(" ".join(_element(shape)))
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _element(shape: Rectangle | LineSegment | Text) -> Iterator[str]:
    match shape:
        case Rectangle():
            yield from _rectangle(shape)
        case LineSegment():
            yield f'<line x1="{_number(shape.x1)}" y1="{_number(shape.y1)}"'
            yield f'x2="{_number(shape.x2)}" y2="{_number(shape.y2)}" stroke="{shape.colour}"'
            yield 'stroke-dasharray="4 3"/>' if shape.dashed else "/>"
        case Text():
            yield f'<text x="{_number(shape.x)}" y="{_number(shape.y + 0.36 * shape.size)}"'
            yield f'font-size="{_number(shape.size)}" fill="{shape.colour}"'
            if shape.bold:
                yield 'font-weight="bold"'
            # Boxes keep their titles: a mouse points through the text.
            yield f'text-anchor="{shape.anchor}" pointer-events="none">{escape(shape.text)}</text>'


def _rectangle(shape: Rectangle) -> Iterator[str]:
    yield f'<rect x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}"'
    yield f'height="{_number(shape.height)}"'
    yield 'fill="url(#idle)"' if shape.hatched else f'fill="{shape.fill}"'
    if shape.outlined:
        yield 'stroke="white"'
    yield f"><title>{escape(shape.title)}</title></rect>" if shape.title else "/>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def png_of(drawing: Drawing) -> bytes:
    """Returns a drawing as a PNG file."""
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
    """Paints one collection for each style: thousands of single patches would take many seconds."""
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
