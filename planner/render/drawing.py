"""A picture as data: rectangles, lines and texts in pixels, from the top left corner down.

Made by :mod:`penstock.planner.render.chart`, written by :mod:`penstock.planner.render.svg` and
:mod:`penstock.planner.render.png`, so that both show the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Anchor(StrEnum):
    """Which end of a text its position is."""

    START = "start"
    MIDDLE = "middle"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Filled; ``outlined`` in white; ``title`` is shown while a mouse points at it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    outlined: bool = False
    hatched: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSegment:
    """From one point to another."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """``y`` is the middle of the line; ``size`` in pixels."""

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: Anchor = Anchor.START
    colour: str = "#222222"
    bold: bool = False

    @property
    def width(self) -> float:
        """An estimate, good enough to see whether the text fits somewhere."""
        return 0.6 * self.size * len(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Painted in the order of its shapes, on white."""

    width: float
    height: float
    shapes: tuple[Rectangle | LineSegment | Text, ...]
