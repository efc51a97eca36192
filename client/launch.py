"""``python -m penstock.client.launch PROCESS …`` runs one process of a run, with few imports.

The supervisor starts its children through this module, since the imports of the command line take
some tenths of a second. ``penstock memoryd`` and the other hidden commands call :func:`launch`,
too.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.client.views.output import forgive_output
from penstock.host.stopping import block_stop_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessKind:
    """A module with ``main(run_dir, *arguments, parent_pid) -> exit code``."""

    module: str
    arguments: tuple[str, ...]


PROCESSES = {
    "memoryd": ProcessKind(module="penstock.daemons.memory.main", arguments=("node", "scheduler")),
    "optimizerd": ProcessKind(
        module="penstock.daemons.optimizer.main", arguments=("node", "scheduler")
    ),
    "mirrord": ProcessKind(module="penstock.daemons.mirror.main", arguments=("node", "scheduler")),
    "fetchd": ProcessKind(module="penstock.daemons.fetch.main", arguments=("node",)),
    "observerd": ProcessKind(module="penstock.daemons.monitor.observer.main", arguments=()),
    "metricsd": ProcessKind(
        module="penstock.daemons.monitor.metrics.main", arguments=("node", "processes")
    ),
    "tracker": ProcessKind(module="penstock.daemons.monitor.trackers.main", arguments=("tracker",)),
    "schedulerd": ProcessKind(
        module="penstock.daemons.scheduler.main", arguments=("port", "grace_seconds")
    ),
    "worker": ProcessKind(module="penstock.workers.main", arguments=("device", "scheduler")),
    "node": ProcessKind(
        module="penstock.daemons.node.main", arguments=("node", "scheduler", "grace_seconds")
    ),
}


def launch(
    process: str,
    config: Path,
    parent_pid: int | None,
    arguments: dict[str, str | int | float | None],
) -> int:
    """Runs one process of the run with the ``resolved.yaml`` ``config``; returns the exit code."""
    if parent_pid is not None:
        # before imports, some of which start threads: a thread inherits the mask
        block_stop_signals()
    forgive_output()
    kind = PROCESSES[process]
    main: Callable[..., int] = importlib.import_module(kind.module).main
    return main(
        run_dir=config.absolute().parent,
        parent_pid=parent_pid,
        **{name: arguments[name] for name in kind.arguments},
    )


def main(words: list[str] | None = None) -> int:
    """Parses the supervisor's command line, and runs the process."""
    parser = argparse.ArgumentParser(prog="penstock.client.launch")
    parser.add_argument("process", choices=sorted(PROCESSES))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node")
    parser.add_argument("--processes")
    parser.add_argument("--device", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--scheduler")
    parser.add_argument("--grace-seconds", type=float)
    parser.add_argument("--tracker")
    parser.add_argument("--parent-pid", type=int)
    options = parser.parse_args(words)
    return launch(options.process, options.config, options.parent_pid, vars(options))


def leave(code: int) -> NoReturn:
    """Ends this process at once, without the interpreter's shutdown.

    ``main`` has closed all resources. Tearing down torch's modules would delay a stop or a
    replacement of a worker by a second.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
