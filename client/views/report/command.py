"""``penstock report``: reads one run or two, and writes the page."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from penstock.client.planning.outputs import write_file
from penstock.client.views.report.compared import comparison_of
from penstock.client.views.report.facts import RunFacts
from penstock.client.views.report.page import page_of, render


def write_report(run: Path, output: Path | None, other: Path | None, *, show: bool) -> Path:
    """Writes the report of ``run``, or of ``run`` and ``other`` beside each other, to ``output`` or
    into the run's directory; returns where it is. ``show``: opens it in the browser.

    Raises:
        ConfigError: a directory is no run's, or the page cannot be written.
        StateError: files of a run are damaged.
    """
    facts = RunFacts.of(run)
    if other is None:
        name, page = "report.html", page_of(facts)
    else:
        beside = RunFacts.of(other)
        name, page = f"compared-{beside.run.run_id}.html", comparison_of(facts, beside)
    path = run / name if output is None else output
    write_file(path, render(page).encode())
    if show:
        webbrowser.open(path.absolute().as_uri())
    return path
