"""Arranges the panels on a terminal of any size.

A terminal with :data:`WIDE` columns gets two columns of panels, a narrower one gets one. Without
enough lines, panels are dropped from the end of :data:`ORDER`. Spare lines go to flexible panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

from penstock.client.views.screen.model import Model
from penstock.client.views.screen.panels import (
    DIVISION,
    EVENTS,
    LANES,
    LOSS,
    MEMORY,
    WORDS,
    Glyphs,
    Panel,
    fitted,
    head,
    joined,
    wrapped,
)
from penstock.client.views.screen.words import GLOSSARY

WIDE = 110
ORDER = (EVENTS, LANES, LOSS, DIVISION, MEMORY, WORDS)
GROWTH = (LOSS, LANES, EVENTS, DIVISION, MEMORY, WORDS)
"""Panels in the order in which they get their first lines (ORDER) and further lines (GROWTH)."""
ONE_COLUMN = (LOSS, DIVISION, LANES, MEMORY, EVENTS, WORDS)
UPPER, LOWER = ((LOSS,), (DIVISION, MEMORY)), ((EVENTS,), (WORDS,))
"""Panels of two columns, left and right: above the lanes and below."""


def compose(
    model: Model, glyphs: Glyphs, width: int, height: int, footer: Text, page: str = ""
) -> list[Text]:
    """Returns the screen: ``height`` lines of ``width`` cells each, with ``footer`` last.

    ``page`` is ``help`` or ``events`` to show that page in place of the panels.
    """
    width, height = max(1, width), max(1, height)
    top = head(model, glyphs, width)[: max(0, height - 1)]
    room = max(0, height - len(top) - 1)
    if page == "help":
        body = _titled("help: any key goes back", _help(width), width, glyphs)
    elif page == "events":
        lines = EVENTS.draw(model, glyphs, width, max(1, room - 1))
        body = _titled("what happened: any key goes back", lines, width, glyphs)
    elif width >= WIDE:
        body = _two_columns(model, glyphs, width, room)
    else:
        body = _column(ONE_COLUMN, model, glyphs, width, room)
    lines = [*top, *body[:room]]
    lines += [Text(end="")] * (height - 1 - len(lines))
    return [fitted(line, width, glyphs) for line in (*lines, footer)][-height:]


def _two_columns(model: Model, glyphs: Glyphs, width: int, room: int) -> list[Text]:
    """Returns two columns, then the lanes over the whole width, then two columns again."""
    left, right = width - width * 4 // 9 - 2, width * 4 // 9
    lanes = min(LANES.most(model, width), max(LANES.least(model), room // 3)) + 1
    lower = min(max(EVENTS.least(model) + 1, (room - lanes) * 2 // 5), room - lanes)
    upper = room - lanes - lower
    return [
        *_beside(UPPER, model, glyphs, (left, right), upper),
        *_column((LANES,), model, glyphs, width, lanes),
        *_beside(LOWER, model, glyphs, (left, right), lower),
    ]


def _beside(
    panels: tuple[Sequence[Panel], Sequence[Panel]],
    model: Model,
    glyphs: Glyphs,
    widths: tuple[int, int],
    room: int,
) -> list[Text]:
    one, other = (
        _column(each, model, glyphs, width, room)
        for each, width in zip(panels, widths, strict=True)
    )
    lines = []
    for first, second in zip_longest(one, other, fillvalue=Text(end="")):
        line = fitted(first, widths[0], glyphs)
        lines.append(line.append("  ").append_text(fitted(second, widths[1], glyphs)))
    return lines


def _column(
    panels: Sequence[Panel], model: Model, glyphs: Glyphs, width: int, room: int
) -> list[Text]:
    sizes = heights(panels, model, width, room)
    lines: list[Text] = []
    for panel in panels:
        if panel in sizes:
            drawn = panel.draw(model, glyphs, width, sizes[panel])[: sizes[panel]]
            lines += _titled(panel.title(model, glyphs), drawn, width, glyphs)
            lines += [Text(end="")] * (sizes[panel] - len(drawn))
    return lines


def heights(panels: Sequence[Panel], model: Model, width: int, room: int) -> dict[Panel, int]:
    """Returns the number of lines of each panel below its title, without dropped panels."""
    chosen: dict[Panel, int] = {}
    for panel in (panel for panel in ORDER if panel in panels):
        least = panel.least(model)
        if room >= least + 1:
            chosen[panel] = least
            room -= least + 1
    for panel in (panel for panel in GROWTH if panel in chosen):
        more = min(room, max(0, panel.most(model, width) - chosen[panel]))
        chosen[panel] += more
        room -= more
    flexible = [panel for panel in panels if panel in chosen and panel.flexible]
    weights = sum(panel.flexible for panel in flexible)
    left = room
    for panel in flexible:
        share = room * panel.flexible // weights if panel is not flexible[-1] else left
        chosen[panel] += share
        left -= share
    return chosen


def _titled(title: str, lines: Sequence[Text], width: int, glyphs: Glyphs) -> list[Text]:
    shown = title if len(title) <= width - 6 else title[: width - 7] + glyphs.more
    rule = joined((f"{glyphs.rule * 2} ", "dim"), (shown, "bold"), " ")
    rule.append_text(joined((glyphs.rule * max(0, width - rule.cell_len), "dim")))
    return [rule, *lines]


_KEYS = (
    ("p", "pause after the current step, or continue after a pause"),
    ("s", "save the committed step now"),
    ("e", "all events"),
    ("h ?", "this page"),
)


def _help(width: int) -> list[Text]:
    lines = [joined((f"{key:>5}  ", "bold"), words) for key, words in _KEYS]
    lines.append(joined(("    q  ", "bold"), "leave the screen (watch), or stop the run (train)"))
    lines.append(Text(end=""))
    for word, meaning in GLOSSARY.items():
        wrapped_lines = wrapped(f"{word}: {meaning}", width)
        wrapped_lines[0].stylize("bold", 0, len(word) + 1)
        lines += wrapped_lines
    return lines
