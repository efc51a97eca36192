"""Writes docs/DASHBOARDS.md and its pictures: ``python -m tests.integration.dashboards FILE``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.grafana.reading import documents, panels
from tests.integration.dashboards.answers import answers_of
from tests.integration.dashboards.pictures import draw
from tests.integration.dashboards.runs import RULES, Watching, planned
from tests.integration.dashboards.table import document
from tests.shelf import Shelf
from tests.system.conftest import Runner

SHOWN = {
    "overview": "clean",
    "time": "clean-emulated",
    "memory": "clean-emulated",
    "recovery": "faulty",
    "node": "clean",
}
"""Which run each picture shows."""


def main(document_path: Path, steps: int = 1200, emulated_steps: int = 120) -> None:
    """Let the four runs go, two at a time, and write what was seen."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "shelf").mkdir()
        runner = Runner(root, Shelf(root / "shelf"))
        watching, plans = Watching(root, runner, [RULES]), planned(steps, emulated_steps)
        try:
            with watching.prometheus as prometheus:
                seen = {key: watching.watch(plan)[key] for key, plan in plans.items()}
                found = {key: answers_of(prometheus, one) for key, one in seen.items()}
        finally:
            runner.stop_all()
    document_path.write_text(document(found, panels()), encoding="utf-8")
    pictures = document_path.parent / "pictures"
    for dashboard in documents():
        run = SHOWN[dashboard]
        shown = [panel for panel in panels() if panel.dashboard == dashboard]
        pairs = [(panel, found[run].get(panel.key)) for panel in shown]
        draw(pairs, pictures / f"dashboard-{dashboard}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
