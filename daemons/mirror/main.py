"""mirrord's main: wires one node's mirrord together and runs it. Nodes start it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock import _native
from penstock.daemons.memory.segments import acquire
from penstock.daemons.memory.server import BlockServer
from penstock.daemons.mirror.effects import MirrorEffects
from penstock.daemons.mirror.machine.machine import MirrorMachine
from penstock.daemons.mirror.metrics import MirrorMetrics
from penstock.daemons.mirror.seeds import Seeder
from penstock.daemons.mirror.service import Inbox, MirrorService, SeedOutcome, ServiceParts
from penstock.daemons.mirror.sweeps import (
    GradientRoom,
    ReplicaSweeps,
    mirrored_blocks,
    read_replica,
)
from penstock.daemons.optimizer.effects import SweepThread
from penstock.daemons.optimizer.inbox import LinkReader, PullOutcome
from penstock.daemons.optimizer.pulls import Puller
from penstock.host import world
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.run.hardware.placement import place
from penstock.protocol.run.names import (
    ipc_address,
    memoryd_name,
    mirrord_name,
    mirrored_by,
    node_index,
    ownership,
)
from penstock.protocol.run.process import RunProcess, run_process
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.blocks import MEMORY_SOCKET, Pace
from penstock.protocol.wire.fetching import fetchers
from penstock.protocol.wire.member import MemberLink, link_to_scheduler
from penstock.protocol.wire.sockets import SocketAccess, socket_access
from penstock.shm.memory import NodeMemory

MIRROR_SOCKET = "mirror"


def main(run_dir: Path, node: str, scheduler: str, parent_pid: int | None) -> int:
    """Runs the mirrord of ``node`` until it is asked to stop; returns the exit code."""
    work = partial(mirrord, node, scheduler)
    return run_process(run_dir, mirrord_name(node), work, parent_pid)


def mirrord(node: str, scheduler: str, process: RunProcess) -> None:
    """Builds the parts of a mirrord and serves until the process is asked to stop."""
    service, link, reader = _build(process, node, scheduler)
    link.start()
    process.keep(link)
    reader.start()
    process.keep(reader)
    service.run()


def _build(
    process: RunProcess, node: str, scheduler: str
) -> tuple[MirrorService, MemberLink, LinkReader]:
    run, config = process.run, process.config
    index, access = node_index(config, node), socket_access(config, run.path, node)
    registry = CollectorRegistry()
    metrics = MirrorMetrics(registry)
    process.serve(registry)
    # The local address is the lock that keeps a second mirrord of this run and node out.
    server = process.keep(
        BlockServer(
            run_id=run.run_id,
            local_address=ipc_address(run.run_id, node, MIRROR_SOCKET),
            host=config.cluster.nodes[index].host,
            attempt_timeout_s=config.cluster.attempt_timeout_s,
            access=access,
            server="mirrord",
        )
    )
    owner = mirrored_by(config, index)
    replica = process.keep(acquire(run.replica_spec(owner)))
    metrics.watch(replica)
    inbox: Inbox = world.queue()
    sweeps = _sweeps(process, index, replica, inbox)
    puller, seeder = _readers(process, index, replica, inbox, access)
    server.start(replica, metrics)
    process.keep(server)  # closed before the replica is unmapped
    link = link_to_scheduler(
        process, node, scheduler, lambda: service.hello(), lambda: service.doing()
    )
    near = {} if config.cluster.fetches_one_sidedly else {memoryd_name(node): _local(run, node)}
    parts = ServiceParts(
        run_id=run.run_id,
        member=process.member,
        owner=config.cluster.nodes[owner].name,
        near=near,
        effects=MirrorEffects(
            replica=replica,
            sweeps=sweeps,
            pulls=puller,
            seeds=seeder,
            metrics=metrics,
            send=link.send,
        ),
        sweeps=sweeps,
        puller=puller,
        seeder=seeder,
        server=server,
        metrics=metrics,
        stop=process.stop,
    )
    machine = MirrorMachine(mirrored_blocks(replica), read_replica(replica))
    service = MirrorService(machine=machine, inbox=inbox, parts=parts)
    return service, link, LinkReader(link, inbox)


def _local(run: RunDirectory, node: str) -> str:
    """Returns where the node's own memoryd is nearest."""
    return ipc_address(run.run_id, node, MEMORY_SOCKET)


def _sweeps(process: RunProcess, index: int, replica: NodeMemory, inbox: Inbox) -> SweepThread:
    """Returns what settles the replica, on as many threads as the optimizer's, which has little to
    do while this one has: settles follow a commit.
    """
    cores = list(place(process.config, index).optimizer)
    pool = process.stack.enter_context(_native.Pool(cores))
    kernels = process.keep(ReplicaSweeps(pool, replica, process.config.optimizer))
    sweeps = SweepThread(kernels, inbox.put)
    sweeps.start()
    return process.keep(sweeps)


def _readers(
    process: RunProcess,
    index: int,
    replica: NodeMemory,
    inbox: Inbox,
    access: SocketAccess,
) -> tuple[Puller, Seeder]:
    """Returns what reads gradients and state from memoryds."""
    run, config, nodes = process.run, process.config, process.config.cluster.nodes
    owners, owner = ownership(config, run.table, run.plan), mirrored_by(config, index)
    puller = Puller(
        run_id=run.run_id,
        remote=GradientRoom(replica),
        source={
            (block.index, k): memoryd_name(nodes[owners.computed_on[block.index][k]].name)
            for block in mirrored_blocks(replica)
            for k in range(block.contributions)
        },
        report=lambda event, num_bytes: inbox.put(PullOutcome(event, num_bytes)),
        open_fetcher=fetchers(config, run.run_id, index, _pace(process, index), access=access),
        access=access,
    )
    seeder = Seeder(
        run_id=run.run_id,
        replica=replica,
        owner=nodes[owner].name,
        split=config.optimizer.master == "split",
        report=lambda event, num_bytes: inbox.put(SeedOutcome(event, num_bytes)),
        pace=_pace(process, index),
        access=access,
    )
    for thread in (puller, seeder):
        thread.start()
        process.keep(thread)
    return puller, seeder


def _pace(process: RunProcess, index: int) -> Pace | None:
    """Returns how fast an emulated node reads from others, for one thread; None for a real one."""
    config = process.config
    if not config.cluster.platform.simulated_clock:
        return None
    pace = Emulation.of(config).reads(process.run.path, config, index)
    process.keep(pace.board)
    return pace
