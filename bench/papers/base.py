"""A table of the page: what a paper says beside what the planner says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """``rows`` of formatted cells under ``columns``; ``text`` says what is compared and how.

    ``text`` names the paper's section, table or figure, the assumptions, and the constants that the
    paper leaves out.
    """

    title: str
    text: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
