"""``penstock optimizerd``: wires one node's optimizerd together and runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.config.training import OptimizerConfig
from penstock.daemons.optimizer.ceiling import ceiling_of
from penstock.daemons.optimizer.cores import open_pool
from penstock.daemons.optimizer.effects import OptimizerEffects, SweepRunner, SweepThread
from penstock.daemons.optimizer.emulated import EmulatedKernels
from penstock.daemons.optimizer.inbox import GradientSocket, Inbox, LinkReader, PullOutcome
from penstock.daemons.optimizer.kernels import Kernels, RemoteGradients, owned_blocks
from penstock.daemons.optimizer.machine.events import OwnedBlock, UpdatePolicy
from penstock.daemons.optimizer.machine.machine import OptimizerMachine
from penstock.daemons.optimizer.metrics import OptimizerMetrics, local_ratio
from penstock.daemons.optimizer.pulls import Puller
from penstock.daemons.optimizer.service import OptimizerService, ServiceParts
from penstock.host import world
from penstock.planner.cost.emulation import Emulation
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.hardware.bandwidth_log import BandwidthLog
from penstock.protocol.run.hardware.placement import Placement, place
from penstock.protocol.run.names import (
    ipc_address,
    memoryd_name,
    node_index,
    optimizerd_name,
    ownership,
)
from penstock.protocol.run.process import RunProcess, run_process
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace import TraceLog
from penstock.protocol.wire.blocks import LeaseCancelledError, attach
from penstock.protocol.wire.fetching import fetchers
from penstock.protocol.wire.member import MemberLink, link_to_scheduler
from penstock.protocol.wire.sockets import SocketAccess, socket_access
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory

GRADIENT_SOCKET = "optimizer"
_MAPPED = (SegmentKind.WEIGHTS, SegmentKind.STATE, SegmentKind.GRADS)


def main(run_dir: Path, node: str, scheduler: str, parent_pid: int | None) -> int:
    """Runs the optimizerd of ``node`` until it is asked to stop; returns the exit code."""
    work = partial(optimizerd, node, scheduler)
    return run_process(run_dir, optimizerd_name(node), work, parent_pid)


def optimizerd(node: str, scheduler: str, process: RunProcess) -> None:
    """Builds the parts of an optimizerd and serves until the process is asked to stop."""
    with suppress(LeaseCancelledError):
        service, link, readers = _build(process, node, scheduler)
        link.start()
        process.keep(link)
        for reader in readers:
            reader.start()
            process.keep(reader)
        service.run()


def _policy(plan: Plan, config: OptimizerConfig) -> Callable[[int], UpdatePolicy]:
    """Returns each block's way from version to version: the plan's, or in place with arithmetic
    rollback.
    """
    ours = UpdatePolicy.IN_PLACE if config.rollback == "arithmetic" else UpdatePolicy.ADVANCE
    policies = dict.fromkeys(plan.settled_early, UpdatePolicy.SETTLE_EARLY)
    policies |= dict.fromkeys(plan.updates, UpdatePolicy.DEVICE)
    policies |= dict.fromkeys(plan.flushed, UpdatePolicy.FLUSH)
    return lambda block: policies.get(block, ours)


def _sources(run: RunDirectory, blocks: tuple[OwnedBlock, ...]) -> dict[tuple[int, int], str]:
    """Returns (block, contribution) computed elsewhere -> name of the memoryd that has it."""
    nodes, owners = run.config.cluster.nodes, ownership(run.config, run.table, run.plan)
    return {
        (block.index, k): memoryd_name(nodes[owners.computed_on[block.index][k]].name)
        for block in blocks
        for k in block.remote
    }


def _build(
    process: RunProcess, node: str, scheduler: str
) -> tuple[OptimizerService, MemberLink, tuple[GradientSocket | LinkReader, ...]]:
    run, config, member = process.run, process.config, process.member
    inbox: Inbox = world.queue()
    index = node_index(config, node)
    registry = CollectorRegistry()
    metrics = OptimizerMetrics(registry)
    placement = place(config, index)  # first of all: refuses cores that are not there
    process.serve(registry)
    several = len(config.cluster.nodes) > 1
    access = socket_access(config, run.path, node)
    gradients = process.keep(
        GradientSocket(
            local_address=ipc_address(run.run_id, node, GRADIENT_SOCKET),
            host=config.cluster.nodes[index].host if several else None,
            inbox=inbox,
            metrics=metrics,
            access=access,
        )
    )
    memory = process.keep(
        attach(run, index, member, kinds=_MAPPED, cancelled=lambda: process.stop.is_set)
    )
    metrics.placed(placement, local_ratio(memory, placement), sum(memory.huge_bytes().values()))
    blocks = owned_blocks(memory, _policy(run.plan, config.optimizer))
    remote = RemoteGradients(memory, blocks, placement)
    kernels, sweeps = _sweeps(process, placement, memory, blocks, remote, inbox, metrics)
    puller = _puller(process, index, blocks, remote, inbox, metrics, access)
    link = link_to_scheduler(
        process,
        node,
        scheduler,
        hello=lambda: service.hello(member, gradients.endpoint),
        doing=lambda: service.doing(sweeps.running),
    )
    parts = ServiceParts(
        run_id=run.run_id,
        blocks=blocks,
        control=memory.control,
        is_named=lambda: memory.is_named,
        kernels=kernels,
        effects=OptimizerEffects(
            control=memory.control, sweeps=sweeps, pulls=puller, send=link.send
        ),
        puller=puller,
        metrics=metrics,
        stop=process.stop,
        trace=TraceLog.of_run(run.path, member, config.observability.traced_every),
    )
    machine = OptimizerMachine(blocks, together=config.emulation.optimizer_start == "flush")
    service = OptimizerService(machine=machine, inbox=inbox, parts=parts)
    return service, link, (LinkReader(link, inbox), gradients)


def _sweeps(
    process: RunProcess,
    placement: Placement,
    memory: NodeMemory,
    blocks: tuple[OwnedBlock, ...],
    remote: RemoteGradients,
    inbox: Inbox,
    metrics: OptimizerMetrics,
) -> tuple[SweepRunner, SweepThread]:
    run, config = process.run, process.config
    pool, threads = process.stack.enter_context(open_pool(placement.optimizer))
    kernels = process.keep(Kernels(pool, memory, config.optimizer, blocks, remote))
    runner: SweepRunner = kernels
    metrics.runs_on(pool.num_threads, sorted(threads))
    if config.cluster.platform.simulated_clock:
        metrics.runs_on(pool.num_threads, ())
        node = memory.spec.node_name
        log = process.keep(BandwidthLog.of_node(run.path, node, config.cluster.workers))
        log.clear()
        emulation = Emulation.of(config)
        runner = EmulatedKernels(kernels, emulation, log)
        if emulation.cluster.dram_bandwidth < math.inf:
            metrics.ceiling(emulation.cluster.dram_bandwidth / emulation.time_scale)
    else:
        ceiling = ceiling_of(run.path, memory.spec, placement.optimizer)
        if ceiling is not None:
            metrics.ceiling(ceiling)
    sweeps = SweepThread(runner, inbox.put)
    sweeps.start()
    return runner, process.keep(sweeps)


def _puller(
    process: RunProcess,
    node: int,
    blocks: tuple[OwnedBlock, ...],
    remote: RemoteGradients,
    inbox: Inbox,
    metrics: OptimizerMetrics,
    access: SocketAccess,
) -> Puller | None:
    """Returns a puller if another node computes gradients of a block of this one."""
    run = process.run
    sources = _sources(run, blocks)
    if not sources:
        return None
    pace = None
    if run.config.cluster.platform.simulated_clock:
        pace = Emulation.of(run.config).reads(run.path, run.config, node)
        process.keep(pace.board)
        pace.board.clear(node)
    puller = Puller(
        run_id=run.run_id,
        remote=remote,
        source=sources,
        report=lambda event, num_bytes: inbox.put(PullOutcome(event, num_bytes)),
        open_fetcher=fetchers(run.config, run.run_id, node, pace, metrics.fetched, access),
        access=access,
    )
    puller.start()
    return process.keep(puller)
