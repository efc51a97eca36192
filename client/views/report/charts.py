"""Charts as inline SVG. The page's style sets the colours, also of a dark page.

A curve has one point for a few pixels: the mean of its values. A band from the least to the
greatest value lies behind the curve. Texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from markupsafe import Markup

from penstock.client.views.report.readings import Point

WIDTH, HEIGHT = 720.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 14.0, 26.0, 28.0
_BUCKETS = 320
_TICKS = 5
NUM_SERIES = 6
"""Number of colours for series in the page's style."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve of points ``(step, value)`` in the order of steps. ``dots`` also draws each point."""

    name: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line at a step, with a text that the mouse pointer shows."""

    step: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of a bar chart: a bar of length ``value``, followed by ``text``."""

    name: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class _Bucket:
    step: float
    mean: float
    low: float
    high: float


def curves(
    series: Sequence[Series], unit: str, marks: Sequence[Mark] = (), *, from_zero: bool = False
) -> Markup:
    """Returns curves over steps on an axis with numbers in ``unit``; nothing without points.

    ``from_zero``: the axis begins at 0, so that heights are comparable.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return Markup()
    frame = _Frame.of([point for one in drawn for point in one.points], from_zero=from_zero)
    parts = [_opening(HEIGHT, ", ".join(one.name for one in drawn)), *frame.axes(unit)]
    parts += [frame.mark(mark) for mark in marks]
    for number, one in enumerate(drawn):
        parts += frame.curve(one, number % NUM_SERIES + 1)
    parts.append("</svg>")
    return Markup("".join(parts)) + _legend([one.name for one in drawn])


def bars(rows: Sequence[Bar]) -> Markup:
    """Returns horizontal bars on a scale from 0, for any width; nothing without rows."""
    longest = max((bar.value for bar in rows), default=0.0) or 1.0
    parts = []
    for bar in rows:
        share = max(0.0, bar.value) / longest
        parts.append(
            f'<div class="bar"><span>{escape(bar.name)}</span><div><i style="width:{share:.1%}">'
            f"</i><em>{escape(bar.text)}</em></div></div>"
        )
    return Markup("".join(parts))


def short(value: float) -> str:
    """Returns a number for an axis or a tile: four digits, with k, M, G, T from 10 000 on."""
    size = abs(value)
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor and size >= 1e4:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def _opening(height: float, title: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img"'
        f' aria-label="{escape(title)}">'
    )


def _legend(names: Sequence[str]) -> Markup:
    if len(names) < 2:
        return Markup()
    items = (
        f'<span><i class="s{number % NUM_SERIES + 1}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return Markup(f'<div class="legend">{"".join(items)}</div>')


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The axes, with the coordinates of steps and values."""

    first: float
    last: float
    low: float
    high: float
    tick: float

    @classmethod
    def of(cls, points: Sequence[Point], *, from_zero: bool) -> _Frame:
        steps, values = [step for step, _ in points], [value for _, value in points]
        low, high = min(values), max(values)
        low = min(0.0, low) if from_zero else low
        # a single value: draw it in the middle
        if high - low <= 1e-12 * max(abs(high), abs(low), 1e-300):
            room = abs(high) * 0.1 or 1.0
            low, high = low - room, high + room
        tick = _nice((high - low) / _TICKS)
        return cls(
            first=min(steps),
            last=max(steps),
            low=math.floor(low / tick + 1e-9) * tick,
            high=math.ceil(high / tick - 1e-9) * tick,
            tick=tick,
        )

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, unit: str) -> Iterator[str]:
        for number in range(round((self.high - self.low) / self.tick) + 1):
            value = self.low + number * self.tick
            value = 0.0 if abs(value) < 1e-9 * self.tick else value
            y = self.y(value)
            yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}"'
            yield f' y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="name" x="{_LEFT - 8}" y="{y:.1f}">{self._text(value)}</text>'
        for step in self._marked_steps():
            text = f"step {step:,.0f}" if step == self.first else f"{step:,.0f}"
            anchor = "start" if self.x(step) < _LEFT + 30 else "middle"
            anchor = "end" if self.x(step) > WIDTH - _RIGHT - 40 else anchor
            yield f'<text x="{self.x(step):.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">'
            yield f"{text}</text>"
        yield f'<text class="unit" x="{_LEFT}" y="9">{escape(unit)}</text>'

    def _text(self, value: float) -> str:
        """Returns a value of the axis with enough digits to distinguish neighbours."""
        if abs(self.high) >= 1e4 or abs(self.low) >= 1e4 or self.tick < 1e-4:
            return short(value)
        return f"{value:.{max(0, -math.floor(math.log10(self.tick) + 1e-9))}f}"

    def mark(self, mark: Mark) -> str:
        x = self.x(min(max(mark.step, self.first), self.last))
        return (
            f'<g class="mark"><line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<circle cx="{x:.1f}" cy="{HEIGHT - _BOTTOM}" r="4"/>'
            f"<title>{escape(mark.text)}</title></g>"
        )

    def curve(self, series: Series, colour: int) -> Iterator[str]:
        buckets = self._buckets(series.points)
        if len(buckets) < len(series.points):
            upper = [f"{self.x(b.step):.1f},{self.y(b.high):.1f}" for b in buckets]
            lower = [f"{self.x(b.step):.1f},{self.y(b.low):.1f}" for b in reversed(buckets)]
            yield f'<polygon class="band s{colour}" points="{" ".join(upper + lower)}"/>'
        line = " ".join(f"{self.x(b.step):.1f},{self.y(b.mean):.1f}" for b in buckets)
        yield f'<polyline class="line s{colour}" points="{line}"/>'
        for bucket in buckets if series.dots or len(buckets) == 1 else ():
            title = f"step {bucket.step:,.0f}: {bucket.mean:.5g}"
            yield f'<circle class="dot s{colour}" cx="{self.x(bucket.step):.1f}" cy='
            yield f'"{self.y(bucket.mean):.1f}" r="3.5"><title>{escape(title)}</title></circle>'

    def _buckets(self, points: Sequence[Point]) -> list[_Bucket]:
        """Returns the points, merged where several share a few pixels."""
        if len(points) <= _BUCKETS:
            return [_Bucket(step, value, value, value) for step, value in points]
        span = (self.last - self.first) or 1.0

        def place(point: Point) -> int:
            return int((point[0] - self.first) / span * (_BUCKETS - 1))

        buckets = []
        for _, group in groupby(sorted(points), key=place):
            steps, values = zip(*group, strict=True)
            mean = math.fsum(values) / len(values)
            buckets.append(_Bucket(steps[len(steps) // 2], mean, min(values), max(values)))
        return buckets

    def _marked_steps(self) -> list[float]:
        tick = max(1.0, _nice((self.last - self.first) / 6.0))
        first = (math.floor(self.first / tick) + 1) * tick
        count = math.floor((self.last - first) / tick + 1e-9) + 1
        inner = [first + number * tick for number in range(max(0, count))]
        room = 0.6 * tick
        return [self.first, *(s for s in inner if s - self.first > room and s <= self.last)]


def _nice(least: float) -> float:
    """Returns the smallest 1, 2 or 5 times a power of ten that is not below ``least``."""
    if least <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * n for n in (1.0, 2.0, 5.0, 10.0) if power * n >= least * (1.0 - 1e-9))
