"""Pictures of a simulation: text for terminals, SVG for browsers.

The instructions themselves, side by side, are :mod:`penstock.planner.grid`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from penstock.planner.simulate import Lane, Simulation, Span

_ROWS = (Lane.FETCH, Lane.COMPUTE, Lane.OFFLOAD)
_ROW_HEIGHT = 22
_LABEL_WIDTH = 110
_CHART_WIDTH = 1200
_COLOURS = {
    "F": "#7fb3e6",
    "R": "#f2d16b",
    "B": "#f0985a",
    "FW": "#b9c4cf",
    "OG": "#9ccc9c",
    "U": "#c39bd3",
}


def timeline(simulation: Simulation, *, width: int = 100) -> str:
    """Compute lanes of the devices and the optimizers of the nodes; ``width`` characters are the
    makespan.

    ``F3`` is the forward of stage 3, ``R3 B3`` recomputation and backward, ``U3`` the optimizer;
    dots are idle.
    """
    rows: list[str] = []
    for (lane, place), spans in _lanes(simulation, (Lane.COMPUTE, Lane.OPTIMIZER)):
        cells = ["."] * width
        for span in spans:
            _draw(cells, span, simulation.makespan_s)
        rows.append(f"{_place_name(lane, place):<12}|{''.join(cells)}|")
    return "\n".join(rows) + "\n"


def _draw(cells: list[str], span: Span, makespan_s: float) -> None:
    if makespan_s <= 0.0:
        return
    width = len(cells)
    first = min(int(span.start_s / makespan_s * width + 0.5), width - 1)
    last = max(first + 1, min(int(span.end_s / makespan_s * width + 0.5), width))
    code, stage, *_ = span.label.split()
    text = f"{code}{stage}"
    room = last - first
    shown = text if len(text) <= room else code[:room]
    cells[first:last] = list(shown.ljust(room, code[0].lower()))


def svg(simulation: Simulation) -> str:
    """A standalone SVG document: one row per stream of each device, one per node's optimizer."""
    lanes = list(_lanes(simulation, (*_ROWS, Lane.OPTIMIZER)))
    height = _ROW_HEIGHT * (len(lanes) + 2)
    scale = _CHART_WIDTH / simulation.makespan_s if simulation.makespan_s > 0.0 else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL_WIDTH + _CHART_WIDTH + 10}"'
        f' height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, ((lane, place), spans) in enumerate(lanes):
        y = _ROW_HEIGHT * (row + 1)
        parts.append(f'<text x="4" y="{y + 14}">{escape(_row_name(lane, place))}</text>')
        parts += [_rectangle(span, y, scale) for span in spans]
    title = (
        f"makespan {simulation.makespan_s:.4g} s, bubbles {simulation.bubble_ratio:.1%},"
        f" optimizer tail {simulation.optimizer_tail_s:.4g} s"
    )
    parts.append(f'<text x="{_LABEL_WIDTH}" y="14">{escape(title)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _rectangle(span: Span, y: int, scale: float) -> str:
    x = _LABEL_WIDTH + span.start_s * scale
    width = max((span.end_s - span.start_s) * scale, 0.5)
    code, *numbers = span.label.split()
    title = f"{span.label}: {span.start_s:.4g} s to {span.end_s:.4g} s"
    text = ""
    if width > 26.0:
        text = f'<text x="{x + 2:.2f}" y="{y + 14}">{escape(code + " ".join(numbers[:1]))}</text>'
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}"'
        f' height="{_ROW_HEIGHT - 4}" fill="{_COLOURS[code]}" stroke="white"/>{text}</g>'
    )


def _lanes(
    simulation: Simulation, shown: tuple[Lane, ...]
) -> Iterable[tuple[tuple[Lane, int], list[Span]]]:
    """Spans by row: devices first, their streams in the order of ``_ROWS``, then nodes."""

    def row_of(span: Span) -> tuple[bool, int, int]:
        optimizer = span.lane is Lane.OPTIMIZER
        return optimizer, span.place, 0 if optimizer else _ROWS.index(span.lane)

    spans = sorted((s for s in simulation.spans if s.lane in shown), key=row_of)
    for _, group in groupby(spans, key=row_of):
        row = list(group)
        yield (row[0].lane, row[0].place), row


def _place_name(lane: Lane, place: int) -> str:
    return f"optimizer {place}" if lane is Lane.OPTIMIZER else f"device {place}"


def _row_name(lane: Lane, place: int) -> str:
    suffix = "" if lane is Lane.OPTIMIZER else f" {lane}"
    return _place_name(lane, place) + suffix
