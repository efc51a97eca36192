"""``penstock observerd``: wires a run's observer together and runs it."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.daemons.monitor.observer.consumer import Consumer, run_consumers
from penstock.daemons.monitor.observer.sampling import make_sampling
from penstock.daemons.monitor.trackers.registry import wanted_trackers
from penstock.daemons.monitor.trackers.supervised import make_trackers
from penstock.protocol.run.names import OBSERVERD
from penstock.protocol.run.process import RunProcess, run_process

LOWEST_PRIORITY = 19


def main(run_dir: Path, parent_pid: int | None) -> int:
    """Observes the run in ``run_dir`` until asked to stop; returns the exit code."""
    return run_process(run_dir, OBSERVERD, observerd, parent_pid)


def observerd(process: RunProcess) -> None:
    """Runs the consumers of a run's files until the process is asked to stop."""
    # Before any thread starts: the step's processes go first wherever there is a core.
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    run = process.run
    registry = CollectorRegistry()
    consumers: list[Consumer] = []
    if run.config.observability.sample_every:
        consumers.append(make_sampling(run, registry))
    consumers += make_trackers(run, wanted_trackers(run.config), registry)
    process.serve(registry)
    run_consumers(consumers, process.stop)
