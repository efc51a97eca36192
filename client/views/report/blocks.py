"""Parts of a page: sections with paragraphs, tables, pictures, folded parts, code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A figure in large letters, with a small ``note`` below."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph."""

    text: str
    kind: str = "words"


@dataclass(frozen=True, slots=True)
class Unknown:
    """A missing fact: the reason, and the way to get the fact."""

    text: str
    kind: str = "unknown"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to copy."""

    text: str
    kind: str = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts. Columns from ``numbers`` on hold numbers and are right-aligned."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 99
    kind: str = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An inline SVG with a caption. ``paper``: True if its colours need a white background.

    ``narrow`` replaces ``image`` in the window of a phone.
    """

    image: Markup
    narrow: Markup = field(default_factory=Markup)
    caption: str = ""
    paper: bool = False
    kind: str = "picture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A part that is hidden until a reader opens it."""

    title: str
    blocks: Sequence[Block]
    kind: str = "folded"


Block = Words | Unknown | Code | Table | Picture | Folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A part of a page with a heading. ``name`` is the target of links."""

    name: str
    heading: str
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page. ``state`` is the state of the run, such as ``running``."""

    title: str
    subtitle: str
    state: str
    tiles: Sequence[Tile]
    sections: Sequence[Chapter]
    made: str
