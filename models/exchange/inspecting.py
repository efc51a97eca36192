"""``python -m penstock.models.exchange.inspecting PATH``: prints a checkpoint's tensors as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.host.limits.bounds import Bounds
from penstock.models.exchange.readers import open_checkpoint
from penstock.protocol.run.process import tool_main


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the inspection; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock.models.exchange.inspecting", description=__doc__
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        with Bounds(alone=options.parent_pid is not None).reading(options.path):
            fields = open_checkpoint(options.path).to_fields()
        sys.stdout.write(json.dumps(fields) + "\n")

    return tool_main(work, options.path, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
