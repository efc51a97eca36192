"""``penstock report``: reads one or two runs, and writes the page."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from penstock.client.planning.outputs import write_file
from penstock.client.views.report.compared import comparison_of
from penstock.client.views.report.facts import RunFacts
from penstock.client.views.report.page import page_of, render


def write_report(run: Path, output: Path | None, other: Path | None, *, show: bool) -> Path:
    """Writes the report of ``run``, or a comparison of ``run`` and ``other``; returns the path.

    The page goes to ``output`` or into the run directory. ``show`` opens the page in a browser.

    Raises:
        ConfigError: a path is no run directory, or the page cannot be written.
        StateError: files of a run are damaged.
    """
    facts = RunFacts.of(run)
    if other is None:
        name, page = "report.html", page_of(facts)
    else:
        second = RunFacts.of(other)
        name, page = f"compared-{second.run.run_id}.html", comparison_of(facts, second)
    path = run / name if output is None else output
    write_file(path, render(page).encode())
    if show:
        webbrowser.open(path.absolute().as_uri())
    return path
