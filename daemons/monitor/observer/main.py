"""``penstock observerd``: wires a run's observer together and runs it."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.daemons.monitor.observer.consumer import Consumer, run_consumers
from penstock.daemons.monitor.observer.sampling import make_sampling
from penstock.daemons.monitor.trackers.registry import wanted_trackers
from penstock.daemons.monitor.trackers.supervised import make_trackers
from penstock.host.stopping import StopSignal
from penstock.protocol.run.metrics import serve_metrics
from penstock.protocol.run.names import OBSERVERD
from penstock.protocol.run.process import configure_logging, die_with_parent, run_main
from penstock.protocol.run.rundir import RunDirectory

LOWEST_PRIORITY = 19


def main(run_dir: Path, parent_pid: int | None) -> int:
    """Observe the run in ``run_dir`` until told to stop; returns the exit code."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    stop = StopSignal().install(parent_pid)
    # For all threads to come: the step's processes go first wherever there is a core.
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    run = RunDirectory(run_dir.absolute())
    return run_main(lambda: _run(run, stop), run.path)


def _run(run: RunDirectory, stop: StopSignal) -> None:
    configure_logging(OBSERVERD, run.path, run.config.observability.log_level)
    registry = CollectorRegistry()
    consumers: list[Consumer] = []
    if run.config.observability.sample_every:
        consumers.append(make_sampling(run, registry))
    consumers += make_trackers(run, wanted_trackers(run.config), registry)
    server = serve_metrics(registry, run, OBSERVERD)
    try:
        run_consumers(consumers, stop)
    finally:
        server.close()
