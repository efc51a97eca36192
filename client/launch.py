"""``python -m penstock.client.launch PROCESS …`` runs one process of a run, with few imports.

The supervisor starts its children through this module: the command line proper costs a few tenths
of a second that a process of a run should not wait for. ``penstock memoryd`` and its siblings end
in the same place.
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

from penstock.host.logs import forgive_streams
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
    """Runs one process of the run whose ``resolved.yaml`` is ``config``; returns its exit code."""
    if parent_pid is not None:
        block_stop_signals()  # before imports: some of them start threads
    forgive_streams()
    # A line on the console for each stranger would fill it; the scheduler counts them in its log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
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
    given = parser.parse_args(words)
    return launch(given.process, given.config, given.parent_pid, vars(given))


def leave(code: int) -> NoReturn:
    """Ends this process at once. Its main has closed what it opened; taking torch's modules apart
    would cost every worker another second, which a stop or a replacement has to wait for.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
