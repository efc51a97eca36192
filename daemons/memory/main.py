"""``penstock memoryd``: wires one node's memoryd."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.daemons.memory.bases.sharing import Sharing
from penstock.daemons.memory.effects import JobThread, LoadInitial, MemoryEffects
from penstock.daemons.memory.machine.machine import MemoryMachine
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.refill import Partner
from penstock.daemons.memory.restore import run_loader
from penstock.daemons.memory.segments import acquire
from penstock.daemons.memory.server import BlockServer
from penstock.daemons.memory.service import MemoryService
from penstock.daemons.preload.client import Preloader
from penstock.daemons.preload.fork_request import PYTHON_MODULE
from penstock.daemons.preload.preloaders import TORCH, take_inherited
from penstock.host import world
from penstock.host.errors import PenstockError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.bases.base_identity import expected_bases
from penstock.protocol.run.hardware.placement import page_places, place
from penstock.protocol.run.names import ipc_address, memoryd_name, node_index, partner_of
from penstock.protocol.run.process import RunProcess, run_process
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.blocks import MEMORY_SOCKET
from penstock.protocol.wire.member import MemberLink, link_to_scheduler
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
    """Runs memoryd, which owns the shared memory of ``node`` until the run ends; returns the exit
    code.

    ``load_initial`` replaces the loader process.
    """
    work = partial(memoryd, node, scheduler, load_initial)
    return run_process(run_dir, memoryd_name(node), work, parent_pid)


def memoryd(
    node: str, scheduler: str, load_initial: LoadInitial | None, process: RunProcess
) -> int:
    """Builds the parts of a memoryd and serves until the run ends; returns the exit code."""
    run, config = process.run, process.config
    index = node_index(config, node)
    registry = CollectorRegistry()
    metrics, machine, jobs = MemoryMetrics(registry), MemoryMachine(), JobThread()
    process.serve(registry)
    # The local address is bound before any segment is opened: the address is the lock that keeps a
    # second memoryd of this run and node out.
    server = process.keep(
        BlockServer(
            run_id=run.run_id,
            local_address=ipc_address(run.run_id, node, MEMORY_SOCKET),
            host=config.cluster.nodes[index].host,
            attempt_timeout_s=config.cluster.attempt_timeout_s,
            access=socket_access(config, run.path, node),
        )
    )
    link = process.keep(_link(process, node, scheduler, machine, jobs, server))
    link.start()
    try:
        memory = _acquire(run, index)
    except PenstockError as error:
        _report(link, error)
        raise
    server.start(memory, metrics)
    metrics.watch(memory)
    preloader = process.stack.enter_context(_own_preloader())
    effects = MemoryEffects(
        memory=memory,
        link=link,
        metrics=metrics,
        load_initial=load_initial or _loader(run, node, jobs, preloader),
        cores=place(config, index).optimizer,
        jobs=jobs,
        state_dir=run.state_dir,
        sharing=Sharing(run=run, node=node),
        partner=_partner(run, index),
    )
    service = MemoryService(
        machine=machine, effects=effects, link=link, server=server, stop=process.stop
    )
    # Unmapped after the end of jobs and block server, which use it.
    process.keep(memory)
    process.keep(server)
    process.keep(effects)
    return service.run()


@contextmanager
def _own_preloader() -> Iterator[Preloader | None]:
    """Yields the preloader that this process has from its start on, if it has one."""
    handle = take_inherited(os.environ).get(TORCH)
    preloader = None if handle is None else Preloader.adopt(handle)
    try:
        yield preloader
    finally:
        if preloader is not None:
            preloader.end()


def _link(
    process: RunProcess,
    node: str,
    scheduler: str,
    machine: MemoryMachine,
    jobs: JobThread,
    server: BlockServer,
) -> MemberLink:
    return link_to_scheduler(
        process,
        node,
        scheduler,
        hello=lambda: pb.Hello(
            run_id=process.run.run_id,
            member=process.member,
            pid=world.pid(),
            epoch=machine.epoch,
            data_endpoint=server.endpoint,
            peers=pb.Peers(),  # The link contacts no peers.
        ),
        doing=lambda: replace(jobs.doing(), stuck=server.stuck),
    )


def _partner(directory: RunDirectory, node: int) -> Partner | None:
    """Returns the node that keeps a replica of this node's memory, if any."""
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
    spec = replace(spec, bases=expected_bases(directory, spec))
    several = placement.several
    return acquire(spec, page_places(placement, spec.layout, spec.table) if several else {})


def _report(link: MemberLink, error: PenstockError) -> None:
    """Reports to the scheduler, if it is reachable soon, why this process cannot serve."""
    deadline_s = world.monotonic() + REPORT_TIMEOUT_S
    while not link.connected and world.monotonic() < deadline_s:
        world.sleep(0.02)
    if not link.connected:
        _log.warning("no scheduler within %g s to report the error to", REPORT_TIMEOUT_S)
    link.send(pb.MemberMessage(failed=pb.Failed(error=str(error), exit_code=int(error.exit_code))))
