"""A curve drawn with characters: braille dots where the terminal has them, stars elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
"""Step and value."""

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character by column and row: two columns of four dots."""
_GUTTER = 8
"""Columns of the numbers and the axis on the left."""


@dataclass(slots=True)
class Series:
    """Points of a curve. Above ``limit`` points, neighbours are averaged, which bounds memory and
    drawing time.
    """

    limit: int = 4096
    _points: list[Point] = field(default_factory=list)
    _each: int = 1
    _pending: list[Point] = field(default_factory=list)

    def add(self, step: float, value: float) -> None:
        """Adds the next point."""
        self._pending.append((step, value))
        if len(self._pending) < self._each:
            return
        self._points.append(_mean(self._pending))
        self._pending.clear()
        if len(self._points) >= self.limit:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._each *= 2

    @property
    def points(self) -> Sequence[Point]:
        """All points, with the mean of points that are not averaged yet."""
        return [*self._points, _mean(self._pending)] if self._pending else self._points


def _mean(points: Sequence[Point]) -> Point:
    return (
        sum(step for step, _ in points) / len(points),
        sum(value for _, value in points) / len(points),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A character of a drawing. ``role``: ``curve``, ``mark`` or ``axis``."""

    text: str
    role: str


def draw(
    points: Sequence[Point],
    marks: Sequence[Point],
    width: int,
    height: int,
    *,
    ascii_only: bool = False,
) -> list[list[Cell]]:
    """Returns ``height`` lines of ``width`` cells: numbers, axis, the curve through ``points``, and
    ``marks``. Without points the lines are empty.
    """
    columns, rows = width - _GUTTER, height - 1
    if columns < 8 or rows < 2 or not points:
        return [[] for _ in range(height)]
    plot = _Plot(points, marks, columns, rows)
    canvas = plot.stars() if ascii_only else plot.dots()
    for column, row in plot.marked():
        canvas[row][column] = Cell(text="o" if ascii_only else "●", role="mark")
    lines = []
    for row in range(rows):
        label = plot.label(row)
        axis = f"{label:>{_GUTTER - 2}} {'|' if ascii_only else '┤' if label else '│'}"
        lines.append([Cell(text=axis, role="axis"), *canvas[row]])
    lines.append([Cell(text=plot.steps().rjust(width), role="axis")])
    return lines


class _Plot:
    def __init__(
        self, points: Sequence[Point], marks: Sequence[Point], columns: int, rows: int
    ) -> None:
        self._columns, self._rows = columns, rows
        self._first = points[0][0]
        self._last = max(points[-1][0], self._first + 1)
        self._path = self._averaged(points, 2 * columns)
        self._marks = [mark for mark in marks if mark[0] >= self._first]
        values = [value for _, value in (*self._path, *self._marks)]
        low, high = min(values), max(values)
        room = 0.03 * (high - low) or max(abs(high), 1.0) * 0.05
        self._low, self._high = low - room, high + room

    def _averaged(self, points: Sequence[Point], bins: int) -> list[Point]:
        """Returns the mean point of each bin with points."""
        groups: dict[int, list[Point]] = {}
        for point in points:
            place = (point[0] - self._first) / (self._last - self._first)
            groups.setdefault(min(bins - 1, int(place * bins)), []).append(point)
        return [_mean(group) for _, group in sorted(groups.items())]

    def _at(self, point: Point, columns: int, rows: int) -> tuple[int, int]:
        step, value = point
        x = (step - self._first) / (self._last - self._first)
        y = (self._high - value) / (self._high - self._low)
        return round(x * (columns - 1)), min(rows - 1, max(0, round(y * (rows - 1))))

    def _track(self, columns: int, rows: int) -> set[tuple[int, int]]:
        """Returns the cells of the curve, without gaps."""
        track: set[tuple[int, int]] = set()
        before: tuple[int, int] | None = None
        for point in self._path:
            here = self._at(point, columns, rows)
            track.update(_line(before or here, here))
            before = here
        return track

    def dots(self) -> list[list[Cell]]:
        """Returns the curve in braille."""
        bits = [[0] * self._columns for _ in range(self._rows)]
        for x, y in self._track(2 * self._columns, 4 * self._rows):
            bits[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        return [
            [Cell(text=chr(_BRAILLE + bit) if bit else " ", role="curve") for bit in line]
            for line in bits
        ]

    def stars(self) -> list[list[Cell]]:
        """Returns the curve in ASCII."""
        track = self._track(self._columns, self._rows)
        return [
            [Cell(text="*" if (x, y) in track else " ", role="curve") for x in range(self._columns)]
            for y in range(self._rows)
        ]

    def marked(self) -> list[tuple[int, int]]:
        """Returns column and row of each mark."""
        return [self._at(mark, self._columns, self._rows) for mark in self._marks]

    def label(self, row: int) -> str:
        """Returns the number of a row, or an empty text."""
        every = max(1, (self._rows - 1) // max(1, min(4, (self._rows - 1) // 2)))
        if row % every and row != self._rows - 1:
            return ""
        if row != self._rows - 1 and self._rows - 1 - row < every:
            return ""  # too near to the last one
        share = row / (self._rows - 1)
        return short(self._high - share * (self._high - self._low))

    def steps(self) -> str:
        """Returns the line of steps: first, middle, last."""
        first, last = f"step {round(self._first)}", f"{round(self._last)}"
        middle = f"{round((self._first + self._last) / 2)}"
        gap = self._columns - len(first) - len(last)
        if gap < len(middle) + 4:
            return f"{first}{last:>{max(1, self._columns - len(first))}}"
        return first + middle.center(gap) + last


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the cells from ``start`` to ``end``, without gaps."""
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps))
        for i in range(steps + 1)
    ]


def short(value: float) -> str:
    """Returns a number in at most six characters, such as ``4.982`` or ``1.2e-05``."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.0e}"
    digits = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{value:.{digits}f}"
