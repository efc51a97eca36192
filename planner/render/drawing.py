"""A picture as data: rectangles, lines and texts in pixels, from the top left corner down.

:mod:`penstock.planner.render.chart` makes drawings, and :mod:`penstock.planner.render.as_files`
writes them as SVG and as PNG, so that both show the same. The colours of pieces of work are here
too: the kind of work gives the hue, its stage the shade.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

GRID = "#d9dee3"
"""Colour of the lines of the time axis."""
IDLE = "#e9ecef"
"""Colour of the time in which a device does not compute."""
INK = "#222222"
FAINT_INK = "#6b7480"
_WHITE = (255, 255, 255)
_BLACK = (0, 0, 0)
_LIGHTEST = 0.38
_DARKEST = 0.22


class Anchor(StrEnum):
    """The end of a text that lies at its position."""

    START = "start"
    MIDDLE = "middle"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A filled rectangle, which may be outlined in white. ``title`` is shown while a mouse points
    at it.
    """

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
    """A straight line from one point to another."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A line of text. ``y`` is the middle of the line; ``size`` is in pixels."""

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: Anchor = Anchor.START
    colour: str = "#222222"
    bold: bool = False

    @property
    def width(self) -> float:
        """An estimate in pixels, good enough to see whether the text fits somewhere."""
        return 0.6 * self.size * len(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Shapes on white, painted in their order. ``width`` and ``height`` are in pixels."""

    width: float
    height: float
    shapes: tuple[Rectangle | LineSegment | Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """A kind of work: its name in the legend and in titles, and its colour."""

    name: str
    colour: str


KINDS: Mapping[str, LegendEntry] = MappingProxyType(
    {
        "F": LegendEntry(name="forward", colour="#4285d6"),
        "R": LegendEntry(name="recompute", colour="#f2bb2e"),
        "B": LegendEntry(name="backward", colour="#2e9e6b"),
        "BI": LegendEntry(name="backward, input (p1)", colour="#34b3a6"),
        "BW": LegendEntry(name="backward, weights (p2)", colour="#8f6cc4"),
        "U": LegendEntry(name="optimizer", colour="#d1495b"),
        "S": LegendEntry(name="optimizer, settle", colour="#b07aa1"),
        "FW": LegendEntry(name="fetch weights", colour="#7d93ab"),
        "OG": LegendEntry(name="offload gradients", colour="#a6813c"),
        "RD": LegendEntry(name="reduce gradients", colour="#c26d2d"),
        "SO": LegendEntry(name="swap out", colour="#c75a9c"),
        "SI": LegendEntry(name="swap in", colour="#e394c1"),
        "activation": LegendEntry(name="send activation", colour="#8fb8ea"),
        "gradient": LegendEntry(name="send gradient", colour="#86cfae"),
        "checkpoint": LegendEntry(name="send checkpoint", colour="#f3d98b"),
    }
)
"""Kinds of work by the first word of a span's label, in the order of the legend."""
_OTHER = LegendEntry(name="other", colour="#999999")


def kind_of(label: str) -> LegendEntry:
    """Returns the kind of work of a span by its label, such as ``F 3 0``."""
    return KINDS.get(label.split(" ", 1)[0], _OTHER)


def shade(colour: str, index: int, count: int) -> str:
    """Returns shade ``index`` of ``count``, from light to dark; the colour itself where there is
    only one.
    """
    if count <= 1:
        return colour
    position = index / (count - 1)
    if position < 0.5:
        return _mix(colour, _WHITE, _LIGHTEST * (1.0 - 2.0 * position))
    return _mix(colour, _BLACK, _DARKEST * (2.0 * position - 1.0))


def ink_on(colour: str) -> str:
    """Returns black or white, whichever is easier to read on a colour."""
    red, green, blue = _channels(colour)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140.0 else INK


def _mix(colour: str, other: tuple[int, int, int], share: float) -> str:
    mixed = (round(a + (b - a) * share) for a, b in zip(_channels(colour), other, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
