"""Writes the dashboards' JSON: ``python -m penstock.grafana.dashboards FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.grafana.dashboards.generating import documents

if __name__ == "__main__":
    for name, text in documents().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
