"""Writes docs/evidence/DASHBOARDS.md and its pictures, from what was answered about the runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.grafana.reading import documents, panels
from tests.integration.dashboards.answers import Answer
from tests.integration.dashboards.pictures import draw
from tests.integration.dashboards.table import document

SHOWN = {
    "overview": "clean",
    "time": "clean-emulated",
    "memory": "clean-emulated",
    "recovery": "faulty",
    "node": "clean",
}
"""Which run each picture shows."""


def write(found: Mapping[str, Mapping[str, Answer]], path: Path) -> None:
    """Write the document to ``path``, and pictures into the folder ``pictures`` beside it; answers
    are by run and panel.
    """
    path.write_text(document(found, panels()), encoding="utf-8")
    pictures = path.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    for dashboard in documents():
        answers = found[SHOWN[dashboard]]
        shown = [panel for panel in panels() if panel.dashboard == dashboard]
        pairs = [(panel, answers.get(panel.key)) for panel in shown]
        draw(pairs, pictures / f"dashboard-{dashboard}.png")
