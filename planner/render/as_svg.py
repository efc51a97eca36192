"""SVG: a standalone document, for browsers. Pointing at a box tells what it is."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from penstock.planner.render.chart import Caption, chart
from penstock.planner.render.drawing import Drawing, LineSegment, Rectangle, Text
from penstock.planner.render.lanes import Picturable

_HATCH = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)"><rect width="6" height="6" fill="#f1f3f5"/>'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#cfd6dd" stroke-width="2"/></pattern></defs>'
)


def svg(simulation: Picturable, caption: Caption | None = None) -> str:
    """The chart of a simulation (:func:`penstock.planner.render.chart.chart`) as SVG."""
    return svg_of(chart(simulation, caption))


def svg_of(drawing: Drawing) -> str:
    """A drawing as a standalone SVG document."""
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
