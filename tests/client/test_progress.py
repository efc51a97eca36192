"""Progress in front of a display: a line in place on a terminal, a line at times elsewhere."""

from __future__ import annotations

import io

import pytest

from penstock.client.views.display import Plain, Silent
from penstock.client.views.progress import PLAIN_S, Working, working


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    now = [0.0]
    stream, lines = Terminal(), []
    work = Working("reading", stream, lambda line: lines.append(line), clock=lambda: now[0])
    now[0] = 0.5
    work.draw()
    assert stream.getvalue() == ""
    now[0] = 12.0
    work.draw()
    work("a line")
    work.draw()
    work.doing("preparing many records")
    work.close()
    work.draw()
    erase = "\r\x1b[2K"
    assert lines == ["a line"]
    assert stream.getvalue() == (
        f"{erase}reading 0:12{erase}{erase}reading 0:12{erase}preparing many records {erase}"
    )


def test_other_outputs_have_a_line_at_times() -> None:
    now = [0.0]
    stream = io.StringIO()
    work = working("preparing the run", Plain(stream, clock=lambda: now[0]))
    work._clock = lambda: now[0]
    work._since_s = work._said_s = 0.0
    for now[0] in (1.0, PLAIN_S, PLAIN_S + 1.0, 2.0 * PLAIN_S):
        work.draw()
    assert stream.getvalue().splitlines() == [
        "preparing the run: 0:15 so far",
        "preparing the run: 0:30 so far",
    ]


def test_a_display_without_a_stream_shows_lines_alone() -> None:
    with working("preparing the run", Silent()) as work:
        work("a line")
        work.draw()
