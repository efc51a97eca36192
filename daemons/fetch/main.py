"""``penstock fetchd``: wires one node's fetchd together and runs it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import zmq
from prometheus_client import CollectorRegistry

from penstock.daemons.fetch.agent import Agent
from penstock.daemons.fetch.clients import Listener
from penstock.daemons.fetch.peers import Peers
from penstock.daemons.fetch.service import FetchService
from penstock.daemons.fetch.serving import SERVED, Serving, draw_generation
from penstock.host.errors import LostMemberError
from penstock.host.stopping import StopSignal
from penstock.protocol.metrics.fetch import FETCH
from penstock.protocol.metrics.page import MetricPage
from penstock.protocol.run.metrics import serve_metrics
from penstock.protocol.run.names import fetchd_name, ipc_address, node_index
from penstock.protocol.run.process import configure_logging, die_with_parent, run_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.blocks import MEMORY_SOCKET, attach, connect
from penstock.protocol.wire.sockets import socket_access
from penstock.shm.memory import NodeMemory

LEASE_TIMEOUT_S = 1.0


def main(run_dir: Path, node: str, parent_pid: int | None) -> int:
    """Run the fetchd of ``node`` until it is told to stop; returns the exit code."""
    if parent_pid is not None:
        die_with_parent(parent_pid)
    stop = StopSignal().install(parent_pid)
    run = RunDirectory(run_dir.absolute())
    return run_main(lambda: _run(run, node, stop), run.path)


def _run(run: RunDirectory, node: str, stop: StopSignal) -> None:
    member = fetchd_name(node)
    configure_logging(member, run.path, run.config.observability.log_level)
    memory = _memory(run, node_index(run.config, node), member, lambda: stop.is_set)
    if memory is None:
        return
    registry = CollectorRegistry()
    with ExitStack() as stack:
        listener = Listener(run.run_id, node)
        stack.callback(listener.close)
        server = serve_metrics(registry, run, member)
        stack.callback(server.close)
        generation = draw_generation()
        agent = Agent(f"{run.run_id}-{node}-{generation:016x}")
        serving = Serving(agent, memory, generation)
        context = stack.enter_context(zmq.Context())
        memoryd = connect(context, ipc_address(run.run_id, node, MEMORY_SOCKET))
        memoryd.set(zmq.SNDHWM, 1)
        stack.callback(memoryd.close, linger=0)
        service = FetchService(
            agent=agent,
            serving=serving,
            listener=listener,
            peers=Peers(agent, run, context, socket_access(run.config, run.path, node)),
            memoryd=memoryd,
            metrics=MetricPage(FETCH, registry),
            stopped=lambda: stop.is_set,
        )
        service.run()


def _memory(
    run: RunDirectory, node: int, member: str, stopped: Callable[[], bool]
) -> NodeMemory | None:
    """Returns the node's memory as soon as memoryd has it; None after a stop."""
    while not stopped():
        try:
            return attach(
                run, node, member, timeout_s=LEASE_TIMEOUT_S, kinds=SERVED, writable=False
            )
        except LostMemberError:
            continue  # memoryd is still starting
    return None
