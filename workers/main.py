"""The worker process: one device, one stream to the scheduler, one interpreter."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from penstock.host import world
from penstock.host.errors import ExitCode, LostMemberError, PenstockError, RefusedError
from penstock.host.limits.cgroup import usable_cpus
from penstock.models.device_facts import device_facts
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.hardware.cpus import threads_per_worker
from penstock.protocol.run.hardware.placement import place
from penstock.protocol.run.names import (
    node_of_device,
    place_of_member,
    worker_name,
)
from penstock.protocol.run.process import RunProcess, run_process
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.member import MemberLink, link_to_scheduler
from penstock.protocol.wire.sockets import socket_access
from penstock.workers.channels.inbox import Inbox
from penstock.workers.channels.opening import transport_here
from penstock.workers.channels.transport import Transport
from penstock.workers.device import WorkerSite
from penstock.workers.epoch_builder import EpochBuilder, bind_transport
from penstock.workers.peers import Peers
from penstock.workers.platforms.registry import open_platform
from penstock.workers.session import Session, fence_listener
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.progress import Progress
from penstock.workers.waiting import EpochFence

_REPORT_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


def main(run_dir: Path, device: int, scheduler: str, parent_pid: int | None = None) -> int:
    """Runs worker ``device`` (counted over all nodes) until Shutdown or SIGTERM.

    ``scheduler`` is HOST:PORT. Returns the exit code: 0 after Shutdown or SIGTERM.
    """
    work = partial(worker, device, scheduler)
    return run_process(run_dir, worker_name(device), work, parent_pid)


def worker(device: int, scheduler: str, process: RunProcess) -> None:
    """Builds the parts of a worker and runs attempts until the process is asked to stop."""
    files, config, stop = process.run, process.config, process.stop
    # Before any thread starts: threads inherit it.
    os.sched_setaffinity(0, place(config, node_of_device(config, device)).workers)
    # Fixed: a repeated attempt gives the same bits only on as many threads.
    torch.set_num_threads(threads_per_worker(config, device, usable_cpus()))
    torch.set_num_interop_threads(1)
    registry = CollectorRegistry()
    fence, progress = EpochFence(stopped=lambda: stop.is_set), Progress()
    metrics = WorkerMetrics(registry, progress)
    process.serve(registry)
    node = config.cluster.nodes[node_of_device(config, device)].name
    access = socket_access(config, files.path, node)
    transport = process.keep(bind_transport(files, device, metrics, Inbox(), access))
    link = process.keep(_connect(process, device, scheduler, fence, progress, transport))
    process.stack.enter_context(_reported_failure(link, fence))
    platform = open_platform(
        WorkerSite(config=config, table=files.table, run_dir=files.path, device_index=device)
    )
    platform.set_up_process()
    metrics.describe_device(platform.peak_flops, platform.meter.limit_bytes)
    builder = EpochBuilder(
        files=files,
        device_index=device,
        platform=platform,
        transport=transport,
        progress=progress,
        metrics=metrics,
        access=access,
        cut_off=lambda epoch, loss: link.send(
            pb.MemberMessage(cut_off=pb.CutOff(epoch=epoch, loss=loss))
        ),
    )
    process.stack.callback(builder.detach)
    builder.compile()
    session = Session(
        link=link,
        builder=builder,
        fence=fence,
        metrics=metrics,
        global_batch=config.train.global_batch,
        handlers=platform.handlers,
    )
    session.run(lambda: stop.is_set)


def _connect(
    process: RunProcess,
    device: int,
    scheduler: str,
    fence: EpochFence,
    progress: Progress,
    transport: Transport,
) -> MemberLink:
    """Returns the worker's link to the scheduler, started."""
    files = process.run
    node, _ = place_of_member(files.config, process.member)
    facts = [pb.Fact(name=name, value=value) for name, value in device_facts(files.config, device)]
    link = link_to_scheduler(
        process,
        node,
        scheduler,
        hello=lambda: pb.Hello(
            run_id=files.run_id,
            member=process.member,
            pid=world.pid(),
            epoch=fence.epoch,
            data_endpoint=transport.address,
            peers=_peers(files, device),
            facts=facts,
        ),
        doing=progress.doing,
        listener=fence_listener(fence),
    )
    link.start()
    return link


def _peers(files: RunDirectory, device: int) -> pb.Peers | None:
    """Returns the peers of the worker by the current plan, for their addresses. None: all members,
    because the plan has errors; Begin reports those.
    """
    config, now = files.config, RunDirectory(files.path)
    try:
        if now.plan_digest != files.plan_digest:
            files = now
        transport = transport_here(config)
        peers = Peers.of(config, files.table, files.plan, device, transport)
    except PenstockError as error:
        _log.warning("asking for the addresses of all members: %s", error)
        return None
    return pb.Peers(members=peers.members(config))


@contextmanager
def _reported_failure(link: MemberLink, fence: EpochFence) -> Iterator[None]:
    """Reports to the scheduler why this process ends, unless the scheduler ended it."""
    try:
        yield
    except RefusedError:
        raise
    except PenstockError as error:
        timed_out = any(isinstance(e, LostMemberError) for e in (error, error.__cause__))
        _report(link, fence, str(error), int(error.exit_code), timed_out=timed_out)
        raise
    except Exception as error:
        _log.exception("worker failed")
        message = f"{type(error).__name__}: {error}"
        _report(link, fence, message, int(ExitCode.LOST_MEMBERS))
        raise PenstockError(message) from error


def _report(
    link: MemberLink, fence: EpochFence, error: str, exit_code: int, *, timed_out: bool = False
) -> None:
    deadline = world.monotonic() + _REPORT_TIMEOUT_S
    while not link.connected and world.monotonic() < deadline:
        world.sleep(0.05)  # the failure may be older than the connection
    failed = pb.Failed(error=error, exit_code=exit_code, epoch=fence.epoch, timed_out=timed_out)
    link.send(pb.MemberMessage(failed=failed))
