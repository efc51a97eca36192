"""A time line for terminals: one row of characters a device, one an optimizer that works."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from penstock.planner.render.lanes import Picturable, numbers_of, rows_of
from penstock.planner.simulate import Span
from penstock.protocol.plan.semantics import Lane

_MAX_PER_UNIT = 8
_READABLE = 0.7
"""A way of naming work is used if at least this share of the pieces has room for it."""


def timeline(simulation: Picturable, *, width: int = 100, abstract: bool = False) -> str:
    """Returns the compute streams of the devices, and the optimizers of the nodes where they take
    time.

    The makespan takes at most ``width`` characters; with ``abstract`` times a whole number of
    characters is one unit, if there is room. The last line explains the names of the pieces.
    """
    rows = [row for row in rows_of(simulation) if row.lane in (Lane.COMPUTE, Lane.OPTIMIZER)]
    scale = _scale(simulation.makespan_s, width, abstract)
    spans = [span for row in rows for track in row.tracks for span in track]
    naming = _choose_naming(spans, scale)
    lines = []
    for row in rows:
        cells = ["."] * max(1, round(simulation.makespan_s * scale))
        for track in row.tracks:
            for span in track:
                _draw(cells, span, scale, naming)
        name = "optimizer" if row.lane is Lane.OPTIMIZER else "device"
        lines.append(f"{f'{name} {row.place}':<12}|{''.join(cells)}|")
    codes = {span.label.split()[0] for span in spans}
    return "\n".join([*lines, _explanation(naming, codes)]) + "\n"


def _scale(makespan_s: float, width: int, abstract: bool) -> float:
    """Returns characters per second (or per unit)."""
    if makespan_s <= 0.0:
        return 0.0
    scale = width / makespan_s
    if abstract and scale >= 1.0:
        return float(min(int(scale), _MAX_PER_UNIT))
    return scale


_STAGE_AND_BATCH, _BATCH, _STAGE, _KIND = range(4)

_EXAMPLES = {
    _STAGE_AND_BATCH: "F2:0 is the forward of stage 2 on micro-batch 0",
    _BATCH: "F0 is the forward of micro-batch 0",
    _STAGE: "F2 is a forward of stage 2",
    _KIND: "F forward",
}
_CODES = {
    "R": "R recompute",
    "B": "B backward",
    "BI": "BI backward of inputs",
    "BW": "BW of weights",
    "U": "U optimizer of a stage",
    "S": "S its settle",
}


def _explanation(naming: int, codes: Set[str]) -> str:
    known = (text for code, text in _CODES.items() if code in codes)
    return "; ".join((", ".join((_EXAMPLES[naming], *known)), "'.' idle"))


def _choose_naming(spans: Sequence[Span], scale: float) -> int:
    """Returns the most telling way of naming that most pieces have room for; it names stages only
    where devices have several.
    """
    compute = [span for span in spans if span.lane is Lane.COMPUTE]
    pairs = {(span.place, span.label.split()[0], numbers_of(span)[0]) for span in compute}
    several = len(pairs) > len({(place, code) for place, code, _ in pairs})
    for naming in (_STAGE_AND_BATCH, _STAGE) if several else (_BATCH,):
        fitting = sum(len(_name(span, naming)) <= _room(span, scale) for span in compute)
        if fitting >= _READABLE * len(compute):
            return naming
    return _KIND


def _name(span: Span, naming: int) -> str:
    code = span.label.split()[0]
    stage, batches = numbers_of(span)
    if span.lane is Lane.OPTIMIZER or (stage is not None and not batches):
        return f"{code}{stage}"
    first, _, rest = batches.partition(",")
    shown = f"{first}+" if rest else first
    return {
        _STAGE_AND_BATCH: f"{code}{stage}:{shown}",
        _BATCH: f"{code}{shown}",
        _STAGE: f"{code}{stage}",
        _KIND: code,
    }[naming]


def _room(span: Span, scale: float) -> int:
    return _edge(span.end_s, scale) - _edge(span.start_s, scale)


def _edge(time_s: float, scale: float) -> int:
    return int(time_s * scale + 0.5)


def _draw(cells: list[str], span: Span, scale: float, naming: int) -> None:
    width = len(cells)
    first = min(_edge(span.start_s, scale), width - 1)
    last = max(first + 1, min(_edge(span.end_s, scale), width))
    code = span.label.split()[0]
    room = last - first
    shown = next((n for n in _names(span, naming) if len(n) <= room), code[:room])
    cells[first:last] = list(shown.ljust(room, code[0].lower()))


def _names(span: Span, naming: int) -> Iterable[str]:
    yield _name(span, naming)
    yield span.label.split()[0]
