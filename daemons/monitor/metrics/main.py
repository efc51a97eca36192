"""``penstock metricsd``: wires one node's metricsd together and runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.config.schema import Config
from penstock.daemons.kit.waits import WaitNote
from penstock.daemons.monitor.metrics.clocks import ClockWatch
from penstock.daemons.monitor.metrics.collection import Collection, labels_of
from penstock.daemons.monitor.metrics.exporter import Exporter, keys_of_metrics
from penstock.daemons.monitor.metrics.exposition import Exposition
from penstock.daemons.monitor.metrics.facts import put_facts
from penstock.daemons.monitor.metrics.resources import NodeResources
from penstock.daemons.monitor.metrics.serving import PortTakenError, application, listen
from penstock.daemons.monitor.metrics.targets import (
    former_port,
    remove_targets,
    renew_targets,
    write_targets,
)
from penstock.host.errors import ConfigError
from penstock.host.logs import Complaints
from penstock.host.stopping import StopSignal
from penstock.protocol.metrics.node import KEYS_EXPIRE, OWN
from penstock.protocol.run.metrics_socket import DroppedLines, render
from penstock.protocol.run.names import (
    SCHEDULERD,
    devices_of_node,
    memoryd_name,
    metricsd_name,
    mirrord_name,
    node_index,
    node_member_name,
    optimizerd_name,
    worker_name,
)
from penstock.protocol.run.process import RunProcess, run_process
from penstock.protocol.security.folders import KeyFolder

RENEW_S = 60.0
PORT_RETRY_S = 1.0
"""Seconds between two tries to listen on a port that another process has."""

_log = logging.getLogger(__name__)


def main(run_dir: Path, node: str, processes: str | None, parent_pid: int | None) -> int:
    """Serves the metrics of ``node`` until stopped; returns the exit code. ``processes``: names of
    its processes, separated by commas; None: the processes of every node.
    """
    work = partial(metricsd, node, processes, alone=parent_pid is None)
    return run_process(run_dir, metricsd_name(node), work, parent_pid)


def metricsd(node: str, processes: str | None, process: RunProcess, *, alone: bool) -> None:
    """Serves metrics until the process is asked to stop. ``alone``: no node started it."""
    run, config = process.run, process.config
    names = _usual(config, node) if processes is None else processes.split(",")
    collection = Collection(
        run.run_id,
        {name: labels_of(config, node, name) for name in names},
        _own_page(process, node),
        labels_of(config, node, process.member),
    )
    pages = application(collection, config, run.path)
    serve = partial(listen, pages, config, node, former_port(run, node))
    # The node found the port free, and a run goes on without metrics.
    note = WaitNote(run.path, process.member)
    server = serve() if alone else _await_port(serve, process.stop, note)
    if server is None:
        return
    process.keep(server)
    write_targets(run, node, server.port)
    process.stack.callback(remove_targets, run, node)
    while not process.stop.wait(RENEW_S):
        renew_targets(run, node, server.port)


def _await_port(serve: Callable[[], Exporter], stop: StopSignal, note: WaitNote) -> Exporter | None:
    """Returns the server, as soon as no other process has its port; None: a stop was asked for.
    ``note`` says meanwhile what metricsd waits for.
    """
    complaints = Complaints(_log)
    try:
        while True:
            try:
                return serve()
            except PortTakenError as error:
                complaints.say(f"waiting: {error}")
                note.renew(f"waiting: {error}")
            if stop.wait(PORT_RETRY_S):
                return None
    finally:
        note.clear()


def _own_page(process: RunProcess, node: str) -> Callable[[], bytes]:
    """Returns a function that renders the page of metricsd itself."""
    run, config = process.run, process.config
    first = config.cluster.nodes[0].name
    registry = CollectorRegistry()
    registry.register(DroppedLines())
    facts = Exposition(OWN)
    put_facts(facts, run)
    resources = process.keep(NodeResources(run, node))
    measuring = [resources.put]
    if node != first:
        clocks = process.keep(ClockWatch(run, first, node))
        measuring.append(clocks.put)
    keys = keys_of_metrics(config, node)
    if keys is not None:
        measuring.append(partial(_put_expiry, KeyFolder(keys)))

    def page() -> bytes:
        exposition = Exposition(OWN)
        for put in measuring:
            put(exposition)
        return facts.page() + exposition.page() + render(registry)

    return page


def _put_expiry(folder: KeyFolder, exposition: Exposition) -> None:
    """Writes the expiry time of the current keys; 0 if they cannot be read."""
    try:
        expires_s = folder.peek().expires.timestamp()
    except ConfigError:
        expires_s = 0.0
    exposition.put(KEYS_EXPIRE.name, expires_s)


def _usual(config: Config, node: str) -> Sequence[str]:
    """Returns the processes that a node has if it has no helpers."""
    index = node_index(config, node)
    names = [node_member_name(node), memoryd_name(node), optimizerd_name(node)]
    if config.mirrors:
        names.append(mirrord_name(node))
    names += [worker_name(device) for device in devices_of_node(config, index)]
    return [SCHEDULERD, *names] if index == 0 else names
