"""SPipe's numbers beside ours (Ryu et al., SC 2025), and a command that predicts its runs.

As a script: ``python bench/papers/spipe.py --help``. The tables are in
:mod:`bench.papers.spipe_cluster.tables`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.papers.page import PaperTable


def tables() -> tuple[PaperTable, ...]:
    """Returns all tables, in the order of the paper."""
    made: tuple[PaperTable, ...] = import_module("bench.papers.spipe_cluster.tables").tables()
    return made


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(import_module("bench.papers.spipe_cluster.command").main(sys.argv[1:]))
