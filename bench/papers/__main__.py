"""``python -m bench.papers docs/evidence/PAPERS.md``: compute every table and write the page.

Pictures go to ``pictures/papers/`` beside it. A paper whose module is missing or fails is named at
the end, with exit code 1; the page then has the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench.papers.page import PAPERS, PICTURES, PaperSection, page, schemes_table


def main(arguments: Sequence[str]) -> int:
    """Computes every table and writes the page; returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m bench.papers PAGE.md\n")
        return 2
    path = Path(arguments[0])
    sections: list[PaperSection] = []
    missing: list[str] = []
    for name, paper in PAPERS.items():
        sys.stderr.write(f"{paper.name}\n")
        try:
            tables = import_module(f"bench.papers.{name}").tables()
        except Exception as error:
            missing.append(f"{name}: {error!r}")
            continue
        sections.append(PaperSection(paper=paper, tables=tables))
    pictures = path.parent / "pictures" / "papers"
    pictures.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        (pictures / f"{picture.name}.svg").write_text(picture.svg(), encoding="utf-8")
    path.write_text(page(sections, schemes_table(), PICTURES), encoding="utf-8")
    for line in missing:
        sys.stderr.write(f"not on the page: {line}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
