"""Run as a script: a real supervisor over stub children given as JSON ``{name: [argv…]}``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.config.schema import Config
from penstock.daemons.node.children import ProcessSpec
from penstock.daemons.node.endpoint import NodeSettings
from penstock.daemons.node.main import main


def specs(config: Config, settings: NodeSettings) -> tuple[ProcessSpec, ...]:
    """The stubs of ``stubs.json`` in the run directory."""
    stubs: dict[str, list[str]] = json.loads((settings.run_dir / "stubs.json").read_text())
    return tuple(ProcessSpec(name=name, argv=tuple(argv)) for name, argv in stubs.items())


if __name__ == "__main__":
    scheduler = sys.argv[2] if len(sys.argv) > 2 and sys.argv[2] else None
    parent_pid = int(sys.argv[3]) if len(sys.argv) > 3 else None
    sys.exit(main(Path(sys.argv[1]), "a", scheduler, parent_pid, specs, check=lambda *_: None))
