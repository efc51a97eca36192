"""``penstock node``: wires one node's supervisor together and runs it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.daemons.node.effects import (
    Children,
    ProcessSpec,
    choose_port,
    read_endpoint,
    read_endpoint_port,
    remove_endpoint,
    write_endpoint,
)
from penstock.daemons.node.lock import RunLock, node_lock_path
from penstock.daemons.node.metrics import NodeMetrics
from penstock.daemons.node.remains import remove_empty_memory
from penstock.daemons.node.service import LinkSettings, StopSettings, Supervisor
from penstock.daemons.node.state import SCHEDULERD, Limits, NodeState
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, LostMemberError
from penstock.protocol.names import (
    devices_of_node,
    memoryd_name,
    metrics_port,
    node_index,
    node_member_name,
    optimizerd_name,
    worker_name,
)
from penstock.protocol.process import (
    configure_logging,
    die_with_parent,
    run_main,
    serve_metrics,
)
from penstock.protocol.rundir import RunDirectory
from penstock.protocol.stopping import Grace
from penstock.shm.process import start_ticks

_log = logging.getLogger(__name__)

LAUNCHER = (sys.executable, "-m", "penstock.client.launch")
PREVIOUS_NODE_WAIT_S = 60.0
ENDPOINT_WAIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """One node's part of a run. ``scheduler`` is ``host:port``; ``hosts`` whether it runs here.

    ``grace_seconds`` replaces ``cluster.grace_seconds``.
    """

    run_dir: Path
    node: str
    scheduler: str
    hosts: bool
    grace_seconds: float | None = None


SpecFactory = Callable[[Config, NodeSettings], tuple[ProcessSpec, ...]]


def child_specs(config: Config, settings: NodeSettings) -> tuple[ProcessSpec, ...]:
    """The processes of a node, the scheduler first where the node hosts it."""
    common = ("--config", str(settings.run_dir / "resolved.yaml"), "--parent-pid", str(os.getpid()))
    joined = (*common, "--scheduler", settings.scheduler)
    named = (*joined, "--node", settings.node)
    specs = [
        _spec(memoryd_name(settings.node), "memoryd", *named),
        _spec(optimizerd_name(settings.node), "optimizerd", *named),
    ]
    if settings.hosts:
        port = settings.scheduler.rpartition(":")[2]
        grace = (
            () if settings.grace_seconds is None else (f"--grace-seconds={settings.grace_seconds}",)
        )
        specs.insert(0, _spec(SCHEDULERD, "schedulerd", *common, "--port", port, *grace))
    for device in devices_of_node(config, node_index(config, settings.node)):
        specs.append(_spec(worker_name(device), "worker", *joined, "--device", str(device)))
    return tuple(specs)


def _spec(name: str, process: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(*LAUNCHER, process, *arguments))


def main(
    run_dir: Path,
    node: str,
    scheduler: str | None,
    parent_pid: int | None,
    specs: SpecFactory = child_specs,
    grace_seconds: float | None = None,
) -> int:
    """Supervise ``node`` of the prepared run in ``run_dir`` until the run ends; the exit code.

    Without ``scheduler`` the first node of the cluster hosts it, and the others find it through
    ``cluster.scheduler_port`` or ``endpoint.json``. ``grace_seconds`` replaces
    ``cluster.grace_seconds``.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    directory, codes = RunDirectory(run_dir.absolute()), list[int]()

    def run() -> None:
        seconds = grace_seconds or directory.config.cluster.grace_seconds
        stops = StopSettings(parent_pid=parent_pid, grace=Grace.of(seconds, os.environ))
        codes.append(_run(directory, node, scheduler, specs, stops))

    return run_main(run, directory.path) or codes[0]


def _run(
    directory: RunDirectory,
    node: str,
    scheduler: str | None,
    specs: SpecFactory,
    stops: StopSettings,
) -> int:
    directory.check_shape()
    config, run_dir = directory.config, directory.path
    known = [entry.name for entry in config.cluster.nodes]
    if node not in known:
        raise ConfigError(f"--node {node}: cluster.nodes has {', '.join(known)}")
    member = node_member_name(node)
    configure_logging(member, run_dir, config.observability.log_level)
    with RunLock.acquire(
        node_lock_path(run_dir, node), wait_s=PREVIOUS_NODE_WAIT_S, inheritable=True
    ):
        settings = replace(
            locate_scheduler(config, run_dir, node, scheduler), grace_seconds=stops.grace.seconds
        )
        children = specs(config, settings)
        metrics = NodeMetrics(node)
        server = serve_metrics(metrics.registry, metrics_port(config, member))
        supervisor = Supervisor(
            NodeState.create(
                tuple(spec.name for spec in children),
                Limits(max_restarts=config.cluster.max_restarts),
            ),
            Children(children, os.environ),
            LinkSettings(
                address=settings.scheduler,
                run_id=directory.run_id,
                member=member,
                metrics_port=server.port,
                heartbeat_interval_s=config.cluster.heartbeat_interval_s,
                silence_timeout_s=config.cluster.heartbeat_timeout_s,
            ),
            metrics,
            stops,
        )
        try:
            if settings.hosts:
                write_endpoint(run_dir, settings.scheduler)
            return supervisor.run()
        finally:
            if settings.hosts:
                remove_endpoint(run_dir)
            server.close()
            if remove_empty_memory(directory.run_id, node):
                _log.info("removed the memory of a run that never began")


def locate_scheduler(
    config: Config, run_dir: Path, node: str, scheduler: str | None
) -> NodeSettings:
    """Where the scheduler is or will be, and whether this node is to host it."""
    first = config.cluster.nodes[0]
    hosts = scheduler is None and node == first.name
    if hosts:
        # Where a killed node of this run had it, other nodes still look for the scheduler.
        port = choose_port(
            first.host, config.cluster.scheduler_port, preferred=read_endpoint_port(run_dir)
        )
        scheduler = f"{first.host}:{port}"
    elif scheduler is None and config.cluster.scheduler_port:
        scheduler = f"{first.host}:{config.cluster.scheduler_port}"
    elif scheduler is None:
        scheduler = wait_for_endpoint(run_dir, timeout_s=ENDPOINT_WAIT_S)
    return NodeSettings(run_dir=run_dir, node=node, scheduler=scheduler, hosts=hosts)


def wait_for_endpoint(run_dir: Path, *, timeout_s: float) -> str:
    """The scheduler's address, as soon as the (living) first node on this machine announces it.

    Raises:
        LostMemberError: it did not in time.
    """
    path = run_dir / "endpoint.json"
    deadline = time.monotonic() + timeout_s
    while True:
        if path.exists():
            found = read_endpoint(run_dir)
            if found is not None and start_ticks(found.pid) is not None:
                return found.scheduler
        if time.monotonic() >= deadline:
            raise LostMemberError(
                f"{path} was not written by a living first node within {timeout_s:g} s:"
                " start that node, or give --scheduler HOST:PORT"
            )
        time.sleep(0.05)
