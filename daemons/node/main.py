"""``penstock node``: wires one node's supervisor together and runs it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config.schema import Config
from penstock.daemons.fetch.agent import why_not
from penstock.daemons.memory.states import saved_steps
from penstock.daemons.monitor.metrics.serving import check_port
from penstock.daemons.monitor.metrics.targets import remove_targets
from penstock.daemons.monitor.observer.consumer import is_observed
from penstock.daemons.node.children import Children, ProcessSpec
from penstock.daemons.node.effects import LinkSettings, NodeMetrics
from penstock.daemons.node.endpoint import (
    NodeSettings,
    locate_scheduler,
    remove_endpoint,
    write_endpoint,
)
from penstock.daemons.node.machine.machine import NodeLimits, NodeMachine
from penstock.daemons.node.run_lock import (
    RunLock,
    kept_words,
    node_lock_path,
    remove_empty_memory,
    remove_memory,
)
from penstock.daemons.node.service import StopSettings, Supervisor
from penstock.daemons.node.service_manager import NodeReports, ServiceManager
from penstock.daemons.preload.fork_request import PYTHON_MODULE
from penstock.daemons.preload.preloaders import PLAIN, TORCH
from penstock.host.errors import FAILURES, ConfigError, ExitCode
from penstock.host.stopping import Grace
from penstock.protocol.run.metrics_socket import serve_metrics
from penstock.protocol.run.names import (
    OBSERVERD,
    SCHEDULERD,
    devices_of_node,
    fetchd_name,
    memoryd_name,
    metricsd_name,
    mirrord_name,
    node_index,
    node_member_name,
    optimizerd_name,
    preloader_name,
    worker_name,
)
from penstock.protocol.run.process import configure_logging, die_with_parent, run_main
from penstock.protocol.run.run_result import EndWatch, RunEnd, forget_end
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.credentials import member_credentials
from penstock.protocol.wire.local_names import prepare_folder

_log = logging.getLogger(__name__)

WORKER = "worker"
LAUNCHER = (*PYTHON_MODULE, "penstock.client.launch")
PREVIOUS_NODE_WAIT_S = 60.0
SHORTEST_HANG_S = 60.0
"""A scheduler that says nothing for less may be busy with a slow disk."""


SpecFactory = Callable[[Config, NodeSettings], tuple[ProcessSpec, ...]]


def child_specs(config: Config, settings: NodeSettings) -> tuple[ProcessSpec, ...]:
    """Returns the processes of a node, the scheduler first where the node hosts it."""
    common = ("--config", str(settings.run_dir / "resolved.yaml"), "--parent-pid", str(os.getpid()))
    joined = (*common, "--scheduler", settings.scheduler)
    named = (*joined, "--node", settings.node)
    specs = [
        _spec(memoryd_name(settings.node), "memoryd", *named),
        _spec(optimizerd_name(settings.node), "optimizerd", *named),
    ]
    if config.mirrors:
        specs.append(_spec(mirrord_name(settings.node), "mirrord", *named))
    if settings.hosts:
        port = settings.scheduler.rpartition(":")[2]
        grace = (
            () if settings.grace_seconds is None else (f"--grace-seconds={settings.grace_seconds}",)
        )
        specs.insert(0, _spec(SCHEDULERD, "schedulerd", *common, "--port", port, *grace))
        if is_observed(config):
            specs.append(replace(_spec(OBSERVERD, "observerd", *common), is_helper=True))
    for device in devices_of_node(config, node_index(config, settings.node)):
        specs.append(_spec(worker_name(device), WORKER, *joined, "--device", str(device)))
    if config.cluster.fetches_one_sidedly:
        specs += _fetchd(config, settings.node, common)
    specs.append(_metricsd(settings.node, specs, common))
    if config.cluster.preload:
        return preloaded(settings, specs)
    return tuple(specs)


def preloaded(settings: NodeSettings, specs: Sequence[ProcessSpec]) -> tuple[ProcessSpec, ...]:
    """Returns the node's preloaders, and then its processes, which they fork.

    A memoryd that is about to have a process write initial weights gets a preloader for that.
    """
    node, is_new = settings.node, not (settings.run_dir / "journal.sqlite").exists()
    preloaders = [
        ProcessSpec(name=preloader_name(kind, node), is_helper=True, preloads=kind)
        for kind in (PLAIN, TORCH)
    ]
    forked = []
    for spec in specs:
        loads = is_new and spec.name == memoryd_name(node)
        kind = TORCH if loads or WORKER in spec.argv else PLAIN
        inherits = (TORCH,) if loads else ()
        forked.append(replace(spec, preloader=preloader_name(kind, node), inherits=inherits))
    return (*preloaders, *forked)


def _metricsd(node: str, specs: list[ProcessSpec], common: tuple[str, ...]) -> ProcessSpec:
    """Returns the node's metricsd, which asks the node itself and all others of its processes."""
    names = ",".join((node_member_name(node), *(spec.name for spec in specs)))
    argv = (*common, "--node", node, "--processes", names)
    return replace(_spec(metricsd_name(node), "metricsd", *argv), is_helper=True)


def _fetchd(config: Config, node: str, common: tuple[str, ...]) -> list[ProcessSpec]:
    """Returns the node's fetchd, where it can work."""
    objection = why_not(asked_for=config.cluster.fetch == "nixl")
    if objection:
        _log.warning("cluster.fetch: %s; blocks of other nodes come by ZeroMQ", objection)
        return []
    spec = _spec(fetchd_name(node), "fetchd", *common, "--node", node)
    return [replace(spec, is_helper=True)]


def _spec(name: str, process: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(*LAUNCHER, process, *arguments))


def _check_room(directory: RunDirectory, node: str) -> None:
    """Refuses to start where CPUs or memory would starve the node. (The planner takes a second to
    load.)
    """
    from penstock.daemons.node.preparing.fitting.planned_run import check_room

    check_room(directory, node_index(directory.config, node))


def main(
    run_dir: Path,
    node: str,
    scheduler: str | None,
    parent_pid: int | None,
    specs: SpecFactory = child_specs,
    *,
    check: Callable[[RunDirectory, str], None] = _check_room,
    grace_seconds: float | None = None,
) -> int:
    """Supervises ``node`` of the prepared run in ``run_dir`` until the run ends; returns the exit
    code.

    Without ``scheduler`` the first node of the cluster hosts the scheduler, and the others find it
    through ``cluster.scheduler_port`` or ``endpoint.json``. ``grace_seconds`` replaces
    ``cluster.stop_grace_s``. ``check`` refuses to start a node that would lack resources; a parent
    has already checked.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    directory, codes = RunDirectory(run_dir.absolute()), list[int]()

    def run() -> None:
        seconds = grace_seconds or directory.config.cluster.stop_grace_s
        stops = StopSettings(parent_pid=parent_pid, grace=Grace.of(seconds, os.environ))
        refuse = check if parent_pid is None else _trust
        codes.append(_run(directory, node, scheduler, specs, stops, refuse))

    code = run_main(run, directory.path) or codes[0]
    if parent_pid is None and code in FAILURES:
        saved = max((step for step, _ in saved_steps(directory.state_dir)), default=0)
        sys.stderr.write(f"penstock: {kept}\n" if (kept := kept_words(directory, saved)) else "")
    return code


def _run(
    directory: RunDirectory,
    node: str,
    scheduler: str | None,
    specs: SpecFactory,
    stops: StopSettings,
    check: Callable[[RunDirectory, str], None],
) -> int:
    directory.check_shape()
    config, run_dir = directory.config, directory.path
    run_id = directory.run_id  # before any wait: refuses a directory that does not hold the run
    known = _known_nodes(config, node)
    member = node_member_name(node)
    # Before any wait: while this node waits for the lock the run may end, and that is news.
    old = RunEnd.read(run_dir) if stops.parent_pid is None else None
    configure_logging(member, run_dir, config.observability.log_level)
    access = member_credentials(config, run_dir, node)
    with RunLock.acquire(
        node_lock_path(run_dir, node), wait_s=PREVIOUS_NODE_WAIT_S, inheritable=True
    ) as lock:
        check(directory, node)
        check_port(config, node)
        starts_run = stops.parent_pid is None and scheduler is None and node == known[0]
        ending = _watch_for_end(run_dir, old, starts_run=starts_run)
        located = locate_scheduler(config, run_dir, node, scheduler, ending)
        manager = ServiceManager.of(os.environ, os.getpid())
        reports = NodeReports(manager, run_dir, config.train.steps, _voice(config, node, stops))
        if located is None:
            manager.over()
            return _clean_up(directory, node, ending)
        settings = replace(located, grace_seconds=stops.grace.seconds)
        children = specs(config, settings)
        metrics = NodeMetrics(tuple(spec.name for spec in children))
        server = serve_metrics(metrics.registry, directory, member)
        supervisor = Supervisor(
            _machine(children, _limits(config, hosts=settings.hosts)),
            Children(children, os.environ, kept=(lock.descriptor,)),
            LinkSettings(
                address=settings.scheduler,
                access=access,
                run_id=run_id,
                member=member,
                heartbeat_interval_s=config.cluster.heartbeat_interval_s,
                silence_timeout_s=config.cluster.heartbeat_timeout_s,
            ),
            metrics,
            stops,
            ending,
            reports,
        )
        sockets = prepare_folder(run_id, node)
        try:
            if settings.hosts:
                write_endpoint(run_dir, settings.scheduler)
            return supervisor.run()
        finally:
            _retract(directory, settings)
            server.close()
            sockets.release()
            _clean_up(directory, node, ending)


def _known_nodes(config: Config, node: str) -> list[str]:
    """Returns the names in ``cluster.nodes``.

    Raises:
        ConfigError: ``node`` is none of them.
    """
    known = [entry.name for entry in config.cluster.nodes]
    if node not in known:
        raise ConfigError(f"--node {node}: cluster.nodes has {', '.join(known)}")
    return known


def _retract(directory: RunDirectory, settings: NodeSettings) -> None:
    """Withdraws the published addresses: no process listens there any more."""
    if settings.hosts:
        remove_endpoint(directory.path)
    if settings.own_port is not None:
        settings.own_port.release()
    remove_targets(directory, settings.node)


def _machine(children: tuple[ProcessSpec, ...], limits: NodeLimits) -> NodeMachine:
    helpers = frozenset(spec.name for spec in children if spec.is_helper)
    names = tuple(spec.name for spec in children)
    forked = {spec.name: spec.preloader for spec in children if spec.preloader}
    return NodeMachine.create(names, limits, helpers, forked)


def _voice(config: Config, node: str, stops: StopSettings) -> Callable[[str], None] | None:
    """Returns what prints a line for people: the first node does, unless a parent shows the run."""
    first = node == config.cluster.nodes[0].name

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    return say if first and stops.parent_pid is None else None


def _trust(directory: RunDirectory, node: str) -> None:
    """Skips the check: the parent has checked."""


def _limits(config: Config, *, hosts: bool) -> NodeLimits:
    """Returns the node's limits. ``hosts``: the scheduler is a child of this node, so no network
    can separate the two.
    """
    cluster = config.cluster
    leased = config.mirrors and not hosts
    return NodeLimits(
        max_restarts=cluster.max_restarts,
        silence_s=cluster.heartbeat_timeout_s,
        hang_s=max(SHORTEST_HANG_S, cluster.attempt_timeout_s),
        lease_s=cluster.heartbeat_timeout_s if leased else None,
    )


def _watch_for_end(run_dir: Path, old: RunEnd | None, *, starts_run: bool) -> EndWatch:
    """Returns the watch for the run's end note. A node that starts the run removes the old note.
    Under ``penstock train``, which has removed it, no note is old: a note means that this node is a
    late replacement.
    """
    if starts_run:
        forget_end(run_dir)
    return EndWatch(run_dir, old=old)


def _clean_up(directory: RunDirectory, node: str, ending: EndWatch) -> int:
    """Removes unneeded memory after all children are dead; returns the exit code."""
    end = ending.look()
    if end is not None and not end.keep_memory:
        if remove_memory(directory.run_id, node):
            _log.info("removed the memory of a run that has ended")
    elif remove_empty_memory(directory.run_id, node):
        _log.info("removed the memory of a run that never began")
    return int(ExitCode.DONE if end is None else end.code)
