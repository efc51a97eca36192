"""mirrord's main: wires one node's mirrord together and runs it. Nodes start it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock import _native
from penstock.config.schema import Config
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
from penstock.host.stopping import StopSignal
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.run.hardware.placement import place
from penstock.protocol.run.metrics import serve_metrics
from penstock.protocol.run.names import (
    ipc_address,
    memoryd_name,
    mirrord_name,
    mirrored_by,
    node_index,
    ownership,
)
from penstock.protocol.run.process import configure_logging, die_with_parent, run_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.security.access import member_access
from penstock.protocol.wire.blocks import MEMORY_SOCKET, Pace
from penstock.protocol.wire.fetching import fetchers
from penstock.protocol.wire.member import MemberLink
from penstock.protocol.wire.sockets import SocketAccess, socket_access
from penstock.shm.memory import NodeMemory

MIRROR_SOCKET = "mirror"


def main(run_dir: Path, node: str, scheduler: str, parent_pid: int | None) -> int:
    """Run the mirrord of ``node`` until it is told to stop; returns the exit code."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    stop = StopSignal().install(parent_pid)
    run = RunDirectory(run_dir)
    return run_main(lambda: _run(run, node, scheduler, stop), run_dir)


def _run(run: RunDirectory, node: str, scheduler: str, stop: StopSignal) -> None:
    configure_logging(mirrord_name(node), run.path, run.config.observability.log_level)
    with ExitStack() as stack:
        service, link, reader = _build(stack, run, node, scheduler, stop)
        link.start()
        stack.callback(link.close)
        reader.start()
        stack.callback(reader.close)
        service.run()


def _build(
    stack: ExitStack, run: RunDirectory, node: str, scheduler: str, stop: StopSignal
) -> tuple[MirrorService, MemberLink, LinkReader]:
    """Make all parts; ``stack`` takes them apart again, in the opposite order."""
    config, member = run.config, mirrord_name(node)
    index, access = node_index(config, node), socket_access(config, run.path, node)
    registry = CollectorRegistry()
    metrics = MirrorMetrics(registry)
    stack.callback(serve_metrics(registry, run, member).close)
    # The local address is the lock that keeps a second mirrord of this run and node out.
    server = BlockServer(
        run_id=run.run_id,
        local_address=ipc_address(run.run_id, node, MIRROR_SOCKET),
        host=config.cluster.nodes[index].host,
        attempt_timeout_s=config.cluster.attempt_timeout_s,
        access=access,
        server="mirrord",
    )
    stack.callback(server.close)
    owner = mirrored_by(config, index)
    replica = acquire(run.replica_spec(owner))
    stack.callback(replica.close)
    metrics.watch(replica)
    inbox: Inbox = world.queue()
    sweeps = _sweeps(stack, config, index, replica, inbox)
    puller, seeder = _readers(stack, run, index, replica, inbox, access)
    server.start(replica, metrics)
    stack.callback(server.close)  # before the replica is unmapped
    link = MemberLink(
        address=scheduler,
        access=member_access(config, run.path, node),
        hello=lambda: service.hello(),
        heartbeat_interval_s=config.cluster.heartbeat_interval_s,
        silence_timeout_s=config.cluster.heartbeat_timeout_s,
        doing=lambda: service.doing(),
    )
    near = {} if config.cluster.fetches_one_sidedly else {memoryd_name(node): _local(run, node)}
    parts = ServiceParts(
        run_id=run.run_id,
        member=member,
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
        stop=stop,
    )
    machine = MirrorMachine(mirrored_blocks(replica), read_replica(replica))
    service = MirrorService(machine=machine, inbox=inbox, parts=parts)
    return service, link, LinkReader(link, inbox)


def _local(run: RunDirectory, node: str) -> str:
    """Returns where the node's own memoryd is nearest."""
    return ipc_address(run.run_id, node, MEMORY_SOCKET)


def _sweeps(
    stack: ExitStack, config: Config, index: int, replica: NodeMemory, inbox: Inbox
) -> SweepThread:
    """Returns what settles the replica, on as many threads as the optimizer's, which has little to
    do while this one has: settles follow a commit.
    """
    pool = stack.enter_context(_native.Pool(list(place(config, index).optimizer)))
    kernels = ReplicaSweeps(pool, replica, config.optimizer)
    stack.callback(kernels.close)
    sweeps = SweepThread(kernels, inbox.put)
    sweeps.start()
    stack.callback(sweeps.close)
    return sweeps


def _readers(
    stack: ExitStack,
    run: RunDirectory,
    index: int,
    replica: NodeMemory,
    inbox: Inbox,
    access: SocketAccess,
) -> tuple[Puller, Seeder]:
    """Returns what reads gradients and state from memoryds."""
    config, nodes = run.config, run.config.cluster.nodes
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
        open_fetcher=fetchers(config, run.run_id, index, _pace(stack, run, index), access=access),
        access=access,
    )
    seeder = Seeder(
        run_id=run.run_id,
        replica=replica,
        owner=nodes[owner].name,
        split=config.optimizer.master == "split",
        report=lambda event, num_bytes: inbox.put(SeedOutcome(event, num_bytes)),
        pace=_pace(stack, run, index),
        access=access,
    )
    for thread in (puller, seeder):
        thread.start()
        stack.callback(thread.close)
    return puller, seeder


def _pace(stack: ExitStack, run: RunDirectory, index: int) -> Pace | None:
    """Returns how fast an emulated node reads from others, for one thread; None for a real one."""
    if not run.config.cluster.platform.simulated_clock:
        return None
    pace = Emulation.of(run.config).reads(run.path, run.config, index)
    stack.callback(pace.board.close)
    return pace
