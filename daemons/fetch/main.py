"""``penstock fetchd``: wires one node's fetchd together and runs it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import zmq
from prometheus_client import CollectorRegistry

from penstock.daemons.fetch.agent import Agent
from penstock.daemons.fetch.clients import Listener
from penstock.daemons.fetch.peers import Peers
from penstock.daemons.fetch.service import FetchService
from penstock.daemons.fetch.serving import SERVED, Serving, draw_generation
from penstock.host.errors import LostMemberError
from penstock.protocol.metrics.memory import FETCH
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.run.names import fetchd_name, ipc_address, node_index
from penstock.protocol.run.process import RunProcess, run_process
from penstock.protocol.wire.blocks import MEMORY_SOCKET, attach, connect
from penstock.protocol.wire.sockets import socket_access
from penstock.shm.memory import NodeMemory

LEASE_TIMEOUT_S = 1.0


def main(run_dir: Path, node: str, parent_pid: int | None) -> int:
    """Runs the fetchd of ``node`` until it is asked to stop; returns the exit code."""
    return run_process(run_dir, fetchd_name(node), partial(fetchd, node), parent_pid)


def fetchd(node: str, process: RunProcess) -> None:
    """Builds the parts of a fetchd and serves until the process is asked to stop."""
    run = process.run
    memory = _memory(process, node_index(run.config, node))
    if memory is None:
        return
    registry = CollectorRegistry()
    listener = process.keep(Listener(run.run_id, node))
    process.serve(registry)
    generation = draw_generation()
    agent = Agent(f"{run.run_id}-{node}-{generation:016x}")
    serving = Serving(agent, memory, generation)
    context = process.stack.enter_context(zmq.Context())
    memoryd = connect(context, ipc_address(run.run_id, node, MEMORY_SOCKET))
    memoryd.set(zmq.SNDHWM, 1)
    process.stack.callback(memoryd.close, linger=0)
    service = FetchService(
        agent=agent,
        serving=serving,
        listener=listener,
        peers=Peers(agent, run, context, socket_access(run.config, run.path, node)),
        memoryd=memoryd,
        metrics=MetricRegistry(FETCH, registry),
        stopped=lambda: process.stop.is_set,
    )
    service.run()


def _memory(process: RunProcess, node: int) -> NodeMemory | None:
    """Returns the node's memory as soon as memoryd has it; None after a stop."""
    while not process.stop.is_set:
        try:
            return attach(
                process.run,
                node,
                process.member,
                timeout_s=LEASE_TIMEOUT_S,
                kinds=SERVED,
                writable=False,
            )
        except LostMemberError:
            continue  # memoryd is still starting
    return None
