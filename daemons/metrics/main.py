"""``penstock metricsd``: wires one node's metricsd together and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.daemons.metrics.collection import Collection, labels_of
from penstock.daemons.metrics.facts import add_facts
from penstock.daemons.metrics.serving import application, listen
from penstock.daemons.metrics.targets import remove_targets, write_targets
from penstock.protocol.config.schema import Config
from penstock.protocol.run.logs import DroppedLines
from penstock.protocol.run.names import (
    SCHEDULERD,
    devices_of_node,
    memoryd_name,
    metricsd_name,
    node_index,
    node_member_name,
    optimizerd_name,
    worker_name,
)
from penstock.protocol.run.process import configure_logging, die_with_parent, run_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.stopping import StopSignal

WAKE_S = 60.0


def main(run_dir: Path, node: str, processes: str | None, parent_pid: int | None) -> int:
    """Serve the metrics of ``node`` until told to stop; returns the exit code. ``processes``: names
    of those that run there, with commas between them; None: those that every node has.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    stop = StopSignal().install(parent_pid)
    run = RunDirectory(run_dir.absolute())
    return run_main(lambda: _run(run, node, processes, stop), run.path)


def _run(run: RunDirectory, node: str, processes: str | None, stop: StopSignal) -> None:
    config, member = run.config, metricsd_name(node)
    configure_logging(member, run.path, config.observability.log_level)
    names = _usual(config, node) if processes is None else processes.split(",")
    registry = CollectorRegistry()
    registry.register(DroppedLines())
    add_facts(registry, run)
    collection = Collection(
        run.run_id,
        {name: labels_of(config, node, name) for name in names},
        registry,
        labels_of(config, node, member),
    )
    with ExitStack() as stack:
        server = listen(application(collection, config, run.path), registry, config, node)
        stack.callback(server.close)
        write_targets(run, node, server.port)
        stack.callback(remove_targets, run, node)
        while not stop.wait(WAKE_S):
            pass


def _usual(config: Config, node: str) -> Sequence[str]:
    """Returns the processes that a node has if it has no helpers."""
    index = node_index(config, node)
    names = [node_member_name(node), memoryd_name(node), optimizerd_name(node)]
    names += [worker_name(device) for device in devices_of_node(config, index)]
    return [SCHEDULERD, *names] if index == 0 else names
