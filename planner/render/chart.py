"""A Gantt chart of a simulation as a drawing, alone or below another one on the same time axis.

Each device has one tall row, its compute stream, and below it thin ones for what it copies, swaps
and sends. The rows of the nodes' optimizers follow. Colours tell the kind of work, shades the stage
among the stages of its device, numbers the micro-batch. Idle time is hatched.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from penstock.planner.render.drawing import (
    FAINT_INK,
    GRID,
    IDLE,
    KINDS,
    Anchor,
    Drawing,
    LegendEntry,
    LineSegment,
    Rectangle,
    Text,
    ink_on,
    kind_of,
    shade,
)
from penstock.planner.render.lanes import ChartRow, Picturable, numbers_of, rows_of, shades_of
from penstock.planner.render.units import SECONDS, TimeUnit
from penstock.planner.simulate import Span
from penstock.protocol.plan.semantics import Lane

_TOP = 62.0
_LINE = 18.0
"""Pixels from one line of the heading to the next."""
_LEGEND_LINE = 20.0
_NOTE_LINE = 14.0
_MARGIN = 12.0
_BELOW = 30.0
"""Pixels between the upper panel's axis and the lower panel."""
_MERGED_BELOW = 0.6
"""Neighbours of one colour that are narrower than this many pixels become one rectangle."""
_OUTLINED_FROM = 3.0
"""Narrower boxes have no outline: it would hide them."""
_LANE_NAMES = {"link": "send", "reduce": "collective"}
Shape = Rectangle | LineSegment | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Widths in pixels: the names of rows, the chart, and the idle shares at the right.

    Titles and the legend start at ``title_x``.
    """

    labels: float
    chart: float
    right: float
    title_x: float

    @property
    def total(self) -> float:
        """Width of the picture."""
        return self.labels + self.chart + self.right

    @property
    def num_ticks(self) -> int:
        """Largest number of numbers below the chart, each with 75 pixels or more."""
        return int(self.chart / 75.0)

    def lines(self, text: str, size: float) -> list[str]:
        """Returns a text in lines that end before the right edge."""
        room = self.total - self.title_x - _MARGIN
        return textwrap.wrap(text, int(room / (0.6 * size))) or [""]


WIDE = Columns(labels=104.0, chart=1260.0, right=96.0, title_x=104.0)
NARROW = Columns(labels=92.0, chart=300.0, right=78.0, title_x=_MARGIN)
"""Columns that fit the window of a phone, with texts of the usual size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """The lines above the chart. ``heading`` names the schedule; times are in ``unit``."""

    heading: str = ""
    unit: TimeUnit = SECONDS


Panel = tuple[Picturable, Caption]
"""A time line and what stands above it."""


def chart(simulation: Picturable, caption: Caption | None = None) -> Drawing:
    """Returns the whole picture. Its width is fixed, its height follows from the rows."""
    return _Chart(simulation, caption or Caption(), WIDE).draw()


def compared(upper: Panel, lower: Panel, columns: Columns = WIDE) -> Drawing:
    """Returns both charts, the first above. The axis is as long as the longer time line."""
    axis_s = max(upper[0].makespan_s, lower[0].makespan_s)
    shapes: list[Shape] = []
    y = 0.0
    panels = [
        _Panel(simulation, caption, columns, axis_s) for simulation, caption in (upper, lower)
    ]
    for panel in panels:
        drawn, height = panel.body()
        shapes += (_lowered(shape, y) for shape in drawn)
        y += height
    legend, end = panels[1].legend_with(panels[0], y + 4.0)
    return Drawing(width=columns.total, height=end, shapes=(*shapes, *legend))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heights:
    """Heights in pixels of a compute row, of a thin track, and of the gap between devices."""

    compute: float
    thin: float
    gap: float

    @classmethod
    def of(cls, num_devices: int) -> _Heights:
        """Returns lower rows for more devices: large pictures stay usable without losing rows."""
        if num_devices <= 16:
            return cls(compute=26.0, thin=8.0, gap=8.0)
        if num_devices <= 64:
            return cls(compute=16.0, thin=4.0, gap=4.0)
        return cls(compute=5.0 if num_devices <= 256 else 2.0, thin=1.0, gap=1.0)


class _Chart:
    def __init__(self, simulation: Picturable, caption: Caption, columns: Columns) -> None:
        self._simulation = simulation
        self._caption = caption
        self._columns = columns
        self._heading = columns.lines(caption.heading, 15.0)
        self._top = _TOP + _LINE * (len(self._heading) - 1)
        self._rows = rows_of(simulation)
        self._heights = _Heights.of(len(simulation.devices))
        makespan_s = simulation.makespan_s
        self._scale = columns.chart / makespan_s if makespan_s > 0.0 else 0.0
        self._digits = len(str(_largest_number(self._rows)))

    def draw(self) -> Drawing:
        rows, bottom = self._all_rows()
        legend, end = self._legend(bottom + 34.0)
        shapes = [*self._title(), *self._axis(bottom), *rows, *self._marks(bottom), *legend]
        return Drawing(width=self._columns.total, height=end, shapes=tuple(shapes))

    def _x(self, time_s: float) -> float:
        return self._columns.labels + time_s * self._scale

    def _title(self) -> Iterator[Shape]:
        simulation, unit = self._simulation, self._caption.unit
        x, y = self._columns.title_x, 18.0
        for number, line in enumerate(self._heading):
            yield Text(x=x, y=y + number * _LINE, text=line, size=15.0, bold=True)
        figures = [
            f"{'makespan' if simulation.optimizer_tail_s > 0.0 else 'takes'}"
            f" {unit.format(simulation.makespan_s)}",
            f"bubbles {simulation.bubble_ratio:.1%}",
        ]
        if simulation.optimizer_tail_s > 0.0:
            figures.append(f"optimizer tail {unit.format(simulation.optimizer_tail_s)}")
        yield Text(x=x, y=self._top - 24.0, text="   ·   ".join(figures), size=12.0)

    def _axis(self, bottom: float) -> Iterator[Shape]:
        for time_s, text in self._caption.unit.ticks(
            self._simulation.makespan_s, at_most=self._columns.num_ticks
        ):
            x = self._x(time_s)
            yield LineSegment(x1=x, y1=self._top - 4.0, x2=x, y2=bottom + 4.0, colour=GRID)
            yield Text(x=x, y=bottom + 14.0, text=text, anchor=Anchor.MIDDLE, colour=FAINT_INK)

    def _marks(self, bottom: float) -> Iterator[Shape]:
        """Marks where the pipeline ends, if something comes after it."""
        simulation = self._simulation
        if simulation.optimizer_tail_s <= 0.0:
            return
        x = self._x(simulation.pipeline_s)
        yield LineSegment(x1=x, y1=self._top - 4.0, x2=x, y2=bottom, colour=FAINT_INK, dashed=True)
        yield Text(
            x=x,
            y=self._top - 10.0,
            text="last computation",
            size=10.0,
            anchor=Anchor.END if x > self._columns.labels + 100.0 else Anchor.START,
            colour=FAINT_INK,
        )

    def _all_rows(self) -> tuple[list[Shape], float]:
        shapes: list[Shape] = []
        y = self._top
        labelled = -100.0
        for key, group in groupby(self._rows, key=lambda r: (r.lane is Lane.OPTIMIZER, r.place)):
            rows = list(group)
            if y - labelled >= 11.0:
                shapes += self._names(rows, y)
                labelled = y
            shades = shades_of([s for row in rows for track in row.tracks for s in track])
            for row in rows:
                drawn, y = self._row(row, y, shades)
                shapes += drawn
            y += self._heights.gap
            del key
        return shapes, y

    def _names(self, rows: list[ChartRow], y: float) -> Iterator[Shape]:
        """Writes the names of the rows on the left, and how idle a device is on the right."""
        heights = self._heights
        size = 12.0 if heights.compute >= 16.0 else 9.0
        for row in rows:
            height = self._height(row)
            if row.lane in (Lane.COMPUTE, Lane.OPTIMIZER):
                name = "device" if row.lane is Lane.COMPUTE else "optimizer"
                yield Text(x=_MARGIN, y=y + height / 2, text=f"{name} {row.place}", size=size)
                if row.lane is Lane.COMPUTE:
                    yield self._idle_share(row.place, y + height / 2, size)
            elif heights.thin >= 8.0:
                yield Text(
                    x=self._columns.labels - 6.0,
                    y=y + height / 2,
                    text=_LANE_NAMES.get(row.lane.value, row.lane.value),
                    size=8.5,
                    anchor=Anchor.END,
                    colour=FAINT_INK,
                )
            y += height

    def _idle_share(self, device: int, y: float, size: float) -> Text:
        idle = self._simulation.devices[device].idle_s / max(self._simulation.pipeline_s, 1e-300)
        x = self._columns.labels + self._columns.chart + 8.0
        return Text(x=x, y=y, text=f"idle {idle:.1%}", size=size - 1.0, colour=FAINT_INK)

    def _height(self, row: ChartRow) -> float:
        heights = self._heights
        tall = row.lane in (Lane.COMPUTE, Lane.OPTIMIZER)
        if tall:
            return heights.compute
        return (heights.thin + 1.0) * len(row.tracks) + 1.0

    def _row(
        self, row: ChartRow, y: float, shades: dict[tuple[str, int], tuple[int, int]]
    ) -> tuple[list[Shape], float]:
        shapes: list[Shape] = []
        height = self._height(row)
        if row.lane is Lane.COMPUTE:
            left = self._columns.labels
            end = self._x(self._simulation.pipeline_s) - left
            shapes.append(Rectangle(x=left, y=y, width=end, height=height, fill=IDLE, hatched=True))
        tall = row.lane in (Lane.COMPUTE, Lane.OPTIMIZER)
        track_height = height / len(row.tracks) if tall else self._heights.thin
        for number, track in enumerate(row.tracks):
            top = y + number * (track_height if tall else track_height + 1.0) + (0.0 if tall else 1)
            for box in self._boxes(track, shades):
                shapes += box.shapes(top, track_height)
        return shapes, y + height

    def _boxes(
        self, spans: Iterable[Span], shades: dict[tuple[str, int], tuple[int, int]]
    ) -> Iterator[_Box]:
        """Makes one box of each span; very narrow neighbours of one colour become one."""
        pending: _Box | None = None
        for span in spans:
            box = self._box(span, shades)
            if pending is not None and pending.takes(box):
                pending = pending.with_(box)
                continue
            if pending is not None:
                yield pending
            pending = box
        if pending is not None:
            yield pending

    def _box(self, span: Span, shades: dict[tuple[str, int], tuple[int, int]]) -> _Box:
        kind = kind_of(span.label)
        stage = numbers_of(span)[0]
        index, count = shades.get((span.label.split(" ", 1)[0], stage or 0), (0, 1))
        return _Box(
            x=self._x(span.start_s),
            end=self._x(span.end_s),
            fill=shade(kind.colour, index, count),
            text=_box_text(span),
            digits=self._digits,
            title=self._span_title(span, kind),
        )

    def _span_title(self, span: Span, kind: LegendEntry) -> str:
        unit = self._caption.unit
        stage, batches = numbers_of(span)
        what = kind.name
        if stage is not None:
            what += f", stage {stage}"
        if batches:
            what += f", micro-batch {batches}"
        if span.peer is not None:
            what += f", to device {span.peer}"
        return (
            f"{what}: {unit.format(span.start_s)} to {unit.format(span.end_s)}"
            f" ({unit.format(span.end_s - span.start_s)})"
        )

    def _legend(self, y: float) -> tuple[list[Shape], float]:
        """Explains the kinds of work that occur and how to read the rest, in as many lines as it
        takes. Returns the shapes and the height at which they end.
        """
        present = {
            span.label.split(" ", 1)[0]
            for row in self._rows
            for track in row.tracks
            for span in track
        }
        entries = [(kind.name, kind.colour) for code, kind in KINDS.items() if code in present]
        entries.append(("idle", ""))
        shapes: list[Shape] = []
        left = x = self._columns.title_x
        for name, colour in entries:
            text = Text(x=x + 18.0, y=y + 6.0, text=name)
            if x + 18.0 + text.width > self._columns.labels + self._columns.chart:
                x, y = left, y + _LEGEND_LINE
                text = Text(x=x + 18.0, y=y + 6.0, text=name)
            fill = colour or IDLE
            shapes += [
                Rectangle(x=x, y=y, width=13.0, height=12.0, fill=fill, hatched=not colour),
                text,
            ]
            x += 18.0 + text.width + 14.0
        note = (
            "Numbers: micro-batches (of copies and optimizers: stages). Light to dark: the stages"
            " of a device, first to last."
        )
        y += _LEGEND_LINE + 4.0
        for number, line in enumerate(self._columns.lines(note, 10.0)):
            y += _NOTE_LINE if number else 0.0
            shapes.append(Text(x=left, y=y, text=line, size=10.0, colour=FAINT_INK))
        return shapes, y + _MARGIN


class _Panel(_Chart):
    """A chart without a legend; its axis may be longer than its time line."""

    def __init__(
        self, simulation: Picturable, caption: Caption, columns: Columns, axis_s: float
    ) -> None:
        super().__init__(simulation, caption, columns)
        self._axis_s = axis_s
        self._scale = columns.chart / axis_s if axis_s > 0.0 else 0.0

    def body(self) -> tuple[list[Shape], float]:
        """Returns the chart's shapes from 0 down, and its height in pixels."""
        rows, bottom = self._all_rows()
        shapes = [*self._title(), *self._axis(bottom), *rows, *self._marks(bottom)]
        return shapes, bottom + _BELOW

    def legend_with(self, other: _Panel, y: float) -> tuple[list[Shape], float]:
        """Returns the legend of both charts, and the height at which it ends."""
        self._rows = (*other._rows, *self._rows)
        return self._legend(y)

    def _axis(self, bottom: float) -> Iterator[Shape]:
        for time_s, text in self._caption.unit.ticks(self._axis_s, at_most=self._columns.num_ticks):
            x = self._x(time_s)
            yield LineSegment(x1=x, y1=self._top - 4.0, x2=x, y2=bottom + 4.0, colour=GRID)
            yield Text(x=x, y=bottom + 14.0, text=text, anchor=Anchor.MIDDLE, colour=FAINT_INK)


def _lowered(shape: Shape, by: float) -> Shape:
    if isinstance(shape, LineSegment):
        return replace(shape, y1=shape.y1 + by, y2=shape.y2 + by)
    return replace(shape, y=shape.y + by)


def _largest_number(rows: Iterable[ChartRow]) -> int:
    """Returns the largest micro-batch: where it has no room, no other is shown either."""
    spans = (s for row in rows for track in row.tracks for s in track)
    texts = (_box_text(span) for span in spans if span.lane is Lane.COMPUTE)
    return max((int(text.rstrip("+")) for text in texts if text), default=0)


def _box_text(span: Span) -> str:
    """Returns the micro-batch, the first of several with a plus; of copies and optimizers the
    stage.
    """
    stage, batches = numbers_of(span)
    if span.lane is Lane.COMPUTE:
        first, _, rest = batches.partition(",")
        return f"{first}+" if rest else first
    return "" if stage is None or span.lane is Lane.LINK else str(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A span, or several narrow ones, between two positions. ``digits``: room that the text
    needs.
    """

    x: float
    end: float
    fill: str
    text: str
    title: str
    digits: int
    count: int = 1

    def takes(self, other: _Box) -> bool:
        narrow = other.end - other.x < _MERGED_BELOW
        return narrow and other.fill == self.fill and other.x - self.end < 0.1

    def with_(self, other: _Box) -> _Box:
        count = self.count + 1
        first = self.title if self.count == 1 else self.title.split("\n")[0]
        return _Box(
            x=self.x,
            end=other.end,
            fill=self.fill,
            text="",
            title=f"{first}\n… {count} in all, the last: {other.title}",
            digits=self.digits,
            count=count,
        )

    def shapes(self, y: float, height: float) -> Iterator[Shape]:
        width = max(self.end - self.x, 0.4)
        yield Rectangle(
            x=self.x,
            y=y,
            width=width,
            height=height,
            fill=self.fill,
            outlined=width >= _OUTLINED_FROM,
            title=self.title,
        )
        text = Text(
            x=self.x + width / 2,
            y=y + height / 2,
            text=self.text,
            size=min(11.0, height - 1.0),
            anchor=Anchor.MIDDLE,
            colour=ink_on(self.fill),
        )
        room = 0.6 * text.size * max(self.digits, len(self.text)) + 2.0
        if self.text and height >= 8.0 and room <= width:
            yield text
