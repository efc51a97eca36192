"""Writes docs/evidence/DASHBOARDS.md: ``python -m tests.integration.dashboards FILE``.

A second argument is how many seconds undisturbed runs train; default 60.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.integration.dashboards.answers import answers_of
from tests.integration.dashboards.runs import RULES, Seen, Watching, planned
from tests.integration.dashboards.writing import write
from tests.shelf import Shelf
from tests.system.conftest import Runner


def main(path: Path, seconds: float = 60.0) -> None:
    """Let the runs go, and write what was seen."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "shelf").mkdir()
        runner = Runner(root, Shelf(root / "shelf"))
        watching = Watching(root, runner, [RULES])
        try:
            with watching.prometheus as prometheus:
                seen: dict[str, Seen] = {}
                for plans in planned(seconds):
                    seen |= watching.watch(plans)
                found = {key: answers_of(prometheus, one) for key, one in seen.items()}
        finally:
            runner.stop_all()
    write(found, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
