"""``penstock memoryd``: wires one node's memoryd."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.daemons.memory.effects import JobThread, LoadInitial, MemoryEffects
from penstock.daemons.memory.machine.machine import MemoryMachine
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.refill import Partner
from penstock.daemons.memory.restore import run_loader
from penstock.daemons.memory.segments import acquire
from penstock.daemons.memory.server import BlockServer
from penstock.daemons.memory.service import MemoryService
from penstock.daemons.preload.birth import PYTHON_MODULE
from penstock.daemons.preload.heirs import take_heirs
from penstock.daemons.preload.kinds import TORCH
from penstock.daemons.preload.owner import Preloader
from penstock.host import world
from penstock.host.errors import PenstockError
from penstock.host.stopping import StopSignal
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.hardware.placement import page_places, place
from penstock.protocol.run.metrics import serve_metrics
from penstock.protocol.run.names import ipc_address, memoryd_name, node_index, partner_of
from penstock.protocol.run.process import configure_logging, die_with_parent, run_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.access import member_access
from penstock.protocol.wire.blocks import MEMORY_SOCKET
from penstock.protocol.wire.member import MemberLink
from penstock.protocol.wire.sockets import socket_access
from penstock.shm.memory import NodeMemory

REPORT_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


def main(
    run_dir: Path,
    node: str,
    scheduler: str,
    parent_pid: int | None = None,
    load_initial: LoadInitial | None = None,
) -> int:
    """Own the shared memory of ``node`` until the run ends; returns the exit code.

    ``load_initial`` replaces the loader process.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    stop = StopSignal().install(parent_pid)
    directory = RunDirectory(run_dir.absolute())
    return run_main(lambda: _run(directory, node, scheduler, load_initial, stop), directory.path)


def _run(
    directory: RunDirectory,
    node: str,
    scheduler: str,
    load_initial: LoadInitial | None,
    stop: StopSignal,
) -> int:
    config, member = directory.config, memoryd_name(node)
    index = node_index(config, node)
    configure_logging(member, directory.path, config.observability.log_level)
    registry = CollectorRegistry()
    metrics, machine, jobs = MemoryMetrics(registry), MemoryMachine(), JobThread()
    with ExitStack() as cleanup:
        exporter = serve_metrics(registry, directory, member)
        cleanup.callback(exporter.close)
        # The local address is bound before any segment is looked at: it is the lock that keeps a
        # second memoryd of this run and node out.
        server = BlockServer(
            run_id=directory.run_id,
            local_address=ipc_address(directory.run_id, node, MEMORY_SOCKET),
            host=config.cluster.nodes[index].host,
            attempt_timeout_s=config.cluster.attempt_timeout_s,
            access=socket_access(config, directory.path, node),
        )
        cleanup.callback(server.close)
        link = _link(directory, node, scheduler, machine, jobs, server)
        link.start()
        cleanup.callback(link.close)
        try:
            memory = _acquire(directory, index)
        except PenstockError as error:
            _report(link, error)
            raise
        server.start(memory, metrics)
        metrics.watch(memory)
        preloader = cleanup.enter_context(_own_preloader())
        loader = _loader(directory, node, jobs, preloader)
        effects = MemoryEffects(
            memory=memory,
            link=link,
            metrics=metrics,
            load_initial=load_initial or loader,
            cores=place(config, index).optimizer,
            jobs=jobs,
            partner=_partner(directory, index),
        )
        service = MemoryService(
            machine=machine, effects=effects, link=link, server=server, stop=stop
        )
        # Unmapped only when nobody can touch it any more: jobs and block server have ended.
        cleanup.callback(memory.close)
        cleanup.callback(server.close)
        cleanup.callback(effects.close)
        return service.run()


@contextmanager
def _own_preloader() -> Iterator[Preloader | None]:
    """Yields the preloader that this process has from birth on, if it has one."""
    heir = take_heirs(os.environ).get(TORCH)
    preloader = None if heir is None else Preloader.adopt(heir)
    try:
        yield preloader
    finally:
        if preloader is not None:
            preloader.end()


def _link(
    directory: RunDirectory,
    node: str,
    scheduler: str,
    machine: MemoryMachine,
    jobs: JobThread,
    server: BlockServer,
) -> MemberLink:
    cluster = directory.config.cluster
    return MemberLink(
        address=scheduler,
        access=member_access(directory.config, directory.path, node),
        hello=lambda: pb.Hello(
            run_id=directory.run_id,
            member=memoryd_name(node),
            pid=world.pid(),
            epoch=machine.epoch,
            data_endpoint=server.endpoint,
            peers=pb.Peers(),  # it contacts nobody
        ),
        heartbeat_interval_s=cluster.heartbeat_interval_s,
        silence_timeout_s=cluster.heartbeat_timeout_s,
        doing=lambda: replace(jobs.doing(), stuck=server.stuck),
    )


def _partner(directory: RunDirectory, node: int) -> Partner | None:
    """Returns who keeps a replica of the node's memory, if anybody does."""
    config = directory.config
    if not config.mirrors:
        return None
    nodes = config.cluster.nodes
    return Partner(
        node=nodes[partner_of(config, node)].name,
        run_id=directory.run_id,
        access=socket_access(config, directory.path, nodes[node].name),
    )


def _loader(
    directory: RunDirectory, node: str, jobs: JobThread, preloader: Preloader | None
) -> LoadInitial:
    """Returns a function that runs the process of initial weights."""
    cluster = directory.config.cluster
    return partial(
        run_loader,
        directory.path,
        node,
        (*PYTHON_MODULE, cluster.platform.loader),
        stopping=jobs.stopping,
        silence_s=cluster.heartbeat_timeout_s,
        preloader=preloader,
    )


def _acquire(directory: RunDirectory, node: int) -> NodeMemory:
    """Returns the node's memory; new pages come to lie near the optimizer's threads."""
    placement = place(directory.config, node)
    spec = directory.memory_spec(node)
    several = placement.several
    return acquire(spec, page_places(placement, spec.layout, spec.table) if several else {})


def _report(link: MemberLink, error: PenstockError) -> None:
    """Tell the scheduler why this process cannot serve, if it can be reached soon."""
    deadline_s = world.monotonic() + REPORT_TIMEOUT_S
    while not link.connected and world.monotonic() < deadline_s:
        world.sleep(0.02)
    if not link.connected:
        _log.warning("no scheduler within %g s to report the error to", REPORT_TIMEOUT_S)
    link.send(pb.MemberMessage(failed=pb.Failed(error=str(error), exit_code=int(error.exit_code))))
