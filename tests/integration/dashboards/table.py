"""docs/evidence/DASHBOARDS.md: the answers of the real Prometheus to every panel."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.grafana.reading import Panel, documents
from tests.integration.dashboards.answers import Answer
from tests.integration.dashboards.expected import CHANGES, EMPTY_WHEN_CLEAN, NEVER_HERE
from tests.integration.dashboards.units import written

MAX_CELL = 50
HEAD = """# Dashboards

Written by `python -m tests.integration.dashboards docs/evidence/DASHBOARDS.md`: after an edit
there, or of a panel, run it again.

Five dashboards for Grafana 11, in `grafana/generated/`. `penstock deploy monitoring DIR` writes
them, with all that Prometheus and Grafana need, and a compose file. Choose the run at the top, and
nodes; *Averaged over* is the window of rates: let it hold several steps. Marks in panels over time
are broken attempts, saves and firing alerts. Each panel explains itself behind the i at its title.

Start with Overview. If steps are slow, *A step would be shorter by* says which resource to look at,
and *Where time goes* why. If something broke, *Recovery and faults* says what, and what it cost.

Their source is `grafana/dashboards/` (`make dashboards`). GPUs' temperatures, and whatever on a
machine is not Penstock's, are left to the dashboards 12239 (NVIDIA DCGM exporter) and 1860 (node
exporter), which Node links to.

The tables have what Debian's Prometheus answered to each panel while it scraped real runs once a
second: *clean* ones that save and evaluate, and *faulty* ones with a killed worker, a stopped one,
a killed optimizer, a pause, saves that fail, and gradients over the limit in every step. On each
side, one has two nodes on CPUs and one emulated V100s; *(e)* is from the latter, where the former
has nothing to say. *(o)*: a run whose gradients overflow. Numbers are the newest at the run's
end, or the least and greatest of several lines. Behind them is the fault that the panel must show;
there, numbers are the greatest of the run's time.

Grafana itself could not be run: the JSON is held against the types of Grafana 11.6 by their own
compiler, and the pictures are drawn from Prometheus' answers in Grafana's layout.
"""


def document(answers: Mapping[str, Mapping[str, Answer]], panels: Sequence[Panel]) -> str:
    """Returns the whole text; ``answers`` are by run and panel."""
    parts = [HEAD]
    for name, made in documents().items():
        title = made["title"].removeprefix("Penstock / ")
        rows = [_row(panel, answers) for panel in panels if panel.dashboard == name and panel.asked]
        parts += [
            f"\n## {title}\n",
            f"{textwrap.fill(made['description'], 100)}\n",
            f"![{title}](pictures/dashboard-{name}.png)\n",
            "| panel | clean | faulty |\n| --- | --- | --- |",
            *rows,
        ]
    return "\n".join([*parts, _reasons()])


def _row(panel: Panel, answers: Mapping[str, Mapping[str, Answer]]) -> str:
    fault = f" ({CHANGES[panel.key][0]})" if panel.key in CHANGES else ""
    cells = [_cell(panel, answers, side) for side in ("clean", "faulty")]
    return f"| {panel.title} | {cells[0]} | {cells[1]}{fault} |"


def _cell(panel: Panel, answers: Mapping[str, Mapping[str, Answer]], side: str) -> str:
    greatest = panel.key in CHANGES
    own, emulated = answers[side][panel.key], answers[f"{side}-emulated"][panel.key]
    if side == "faulty" and panel.key == "recovery: Loss scale":
        return f"{summary(answers['faulty-overflows'][panel.key], greatest)} (o)"
    if own.lines or not emulated.lines or panel.key in EMPTY_WHEN_CLEAN:
        return summary(own, greatest)
    return f"{summary(emulated, greatest)} (e)"


def _states(answer: Answer) -> str:
    """Returns the names of the values in an answer, by how often they were there."""
    names = answer.panel.raw["fieldConfig"]["defaults"]["mappings"][0]["options"]
    seen = Counter(names[f"{value:g}"]["text"] for line in answer.lines for value in line.values)
    shares = (f"{name} {100 * n / seen.total():.0f} %" for name, n in seen.most_common(3))
    return f"{len(answer.lines)} lanes: {', '.join(shares)}"


def summary(answer: Answer, greatest: bool = False) -> str:
    """Returns an answer in a few words; with ``greatest`` values are the greatest in time."""
    unit, lines, decimals = answer.panel.unit or "none", answer.lines, answer.panel.decimals
    if not lines:
        return "-"
    if answer.panel.kind == "state-timeline":
        return _states(answer)
    newest = [max(line.values) if greatest else line.values[-1] for line in lines]
    if answer.panel.kind == "table" and "Value" not in _columns(answer.panel):
        return f"{len(lines)} rows" if len(lines) > 1 else "1 row"
    one_by_one = "; ".join(
        f"{line.name} {written(value, unit, decimals)}".strip()
        for line, value in zip(lines, newest, strict=True)
    )
    if answer.panel.raw.get("options", {}).get("textMode") == "name":
        return lines[0].name
    if len(lines) <= 3 and len(one_by_one) <= MAX_CELL:
        return one_by_one
    least, most = (written(pick(newest), unit, decimals) for pick in (min, max))
    return f"{len(lines)} lines: {least} to {most}"


def _columns(panel: Panel) -> Sequence[str]:
    names: Sequence[str] = panel.raw["transformations"][0]["options"]["include"]["names"]
    return names


def _reasons() -> str:
    rows = [f"* {key}: {why}." for key, why in {**EMPTY_WHEN_CLEAN, **NEVER_HERE}.items()]
    return "\n".join(["\n## Empty by meaning\n", *rows, ""])
