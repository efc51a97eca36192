"""What a fetch of a block costs from another process, over loopback: raw TCP beside ours.

    python -m bench.fetch [--rounds 15] [--ways raw,zmq,curve,nixl-tcp,nixl-shm]

The serving sides are processes of their own: memoryd's real block server for ZeroMQ, for raw TCP a
loop that sends the same shared memory with ``sendall``, for NIXL two fetchds (docs/NODES.md), one
that reads and one that is read, over TCP and within the machine. In every round each way fetches
the same bytes, one after the other, so that what else runs on the machine disturbs all alike. GB/s
and latency are medians of the rounds, ``of raw`` is the median of each round's ratio to raw TCP,
and CPU seconds are those of all its processes together, all threads, system time included.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import socket
import statistics
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import zmq
from prometheus_client import CollectorRegistry

from penstock.daemons.fetch.agent import Agent, find_module
from penstock.daemons.fetch.clients import Listener
from penstock.daemons.fetch.peers import Peers
from penstock.daemons.fetch.service import FetchService
from penstock.daemons.fetch.serving import Serving, draw_generation
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.protocol.metrics.memory import FETCH
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.run.names import ipc_address
from penstock.protocol.security.authority import make
from penstock.protocol.wire.blocks import BlockClient, connect
from penstock.protocol.wire.frames import BlockRequest
from penstock.protocol.wire.sockets import OPEN, CurveAccess, SocketAccess
from penstock.protocol.wire.staged import AwayError, StagedClient, socket_address
from penstock.shm.layout import NodeLayout, Ownership, Storage
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, MIB, 8 * MIB, 64 * MIB)
"""Of the arrays, in bytes; block ``i`` has one of ``SIZES[i]``."""
ROUND_BYTES = 128 * MIB
ROUND_FETCHES = 200
"""A way fetches so many bytes in a round, and at most so many arrays."""
TIMEOUT_S = 60.0
HOST = "127.0.0.1"
_REQUEST = struct.Struct("<I")


def block_table() -> BlockTable:
    """Blocks of frozen weights, one for each size."""
    blocks = tuple(
        BlockSpec(
            index=index,
            name=f"block{index}",
            kind="layer",
            layer_index=index,
            tensors=(
                TensorSpec(name="w", shape=(16,), trainable=True, decay=False, offset=0),
                TensorSpec(name="f", shape=(size // 2,), trainable=False, decay=False, offset=0),
            ),
            borrows=(),
            trainable_elements=16,
            frozen_elements=size // 2,
            contributions=1,
            forward_flops=1.0,
            activation_bytes=1.0,
            output_bytes=1.0,
        )
        for index, size in enumerate(SIZES)
    )
    return BlockTable(
        blocks=blocks,
        weight_dtype=DType.BF16,
        grad_dtype=DType.BF16,
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=256,
        num_parameters=sum(SIZES) // 2,
    )


def memory_spec(run_id: str) -> MemorySpec:
    """Returns the memory that both serving sides map."""
    table = block_table()
    owners = Ownership.from_backward_nodes(table, [0] * len(SIZES))
    layout = NodeLayout.compute(table, owners, 0, Storage(split_master=False, single_gradients=()))
    return MemorySpec(run_id=run_id, node_name="a", table=table, layout=layout, undo_bytes=4096)


class Fetcher(Protocol):
    """The fetching end of a way."""

    def fetch(self, block: int, out: np.ndarray[Any, Any]) -> None:
        """Fills ``out`` with the frozen weights of a block."""

    def close(self) -> None:
        """Disconnects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """``serve(memory, pipe)`` runs in a process of its own: it sends an address, serves until it
    hears something, and returns. ``connect(address, run_id)`` is the other end.
    """

    serve: Callable[[NodeMemory, Connection], None]
    connect: Callable[[Any, str], Fetcher]


def serve_raw(memory: NodeMemory, pipe: Connection) -> None:
    """Serves one connection; each request is a block's number, the answer its bytes."""
    with socket.create_server((HOST, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
                connection.sendall(memory.raw((*_REQUEST.unpack(request), "frozen", 0, 0)))
    pipe.recv()


class RawFetcher:
    """The other end of :func:`serve_raw`."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(self, block: int, out: np.ndarray[Any, Any]) -> None:
        """Implements :class:`Fetcher`."""
        self._socket.sendall(_REQUEST.pack(block))
        view, received = memoryview(out), 0
        while received < len(view):
            received += self._socket.recv_into(view[received:])

    def close(self) -> None:
        """Implements :class:`Fetcher`."""
        self._socket.close()


def keys_of(run_id: str) -> Path:
    """Returns the folder of the keys of nodes ``a``, which serves, and ``b``, which fetches."""
    return Path(tempfile.gettempdir()) / f"penstock-bench-{run_id}"


def serve_zmq(memory: NodeMemory, pipe: Connection, access: SocketAccess = OPEN) -> None:
    """Runs memoryd's block server."""
    spec = memory.spec
    server = BlockServer(
        run_id=spec.run_id,
        local_address=ipc_address(spec.run_id, "a", f"bench-{uuid.uuid4().hex}"),
        host=HOST,
        access=access,
    )
    server.start(memory, MemoryMetrics(CollectorRegistry()))
    pipe.send(server.endpoint)
    pipe.recv()
    server.close()


def frozen_request(run_id: str, block: int) -> BlockRequest:
    """Asks for a block's frozen weights."""
    return BlockRequest(
        run_id=run_id,
        epoch=1,
        attempt=1,
        array="frozen",
        block=block,
        version=0,
        contribution=0,
    )


def serve_curve(memory: NodeMemory, pipe: Connection) -> None:
    """Runs the same server with keys."""
    serve_zmq(memory, pipe, CurveAccess(keys_of(memory.spec.run_id) / "node.a"))


class ZmqFetcher:
    """The client that workers and optimizerds use."""

    def __init__(self, address: str, run_id: str, access: SocketAccess = OPEN) -> None:
        self._address, self._run_id = address, run_id
        self._context: zmq.Context[Any] = zmq.Context()
        self._client = BlockClient(self._context, access=access)

    def fetch(self, block: int, out: np.ndarray[Any, Any]) -> None:
        """Implements :class:`Fetcher`."""
        request = frozen_request(self._run_id, block)
        self._client.fetch(self._address, request, out, timeout_s=TIMEOUT_S)

    def close(self) -> None:
        """Implements :class:`Fetcher`."""
        self._client.close()
        self._context.term()


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlAddress:
    """The memoryd that knows of the fetchd that is read, and the processes of both fetchds."""

    memoryd: str
    pids: tuple[int, ...]


READER = "b"
"""Node of the fetchd that reads."""


def fetchd(node: str, run_id: str, offer_to: str, transports: str, pipe: Connection) -> None:
    """Runs the process of a fetchd, with the real one's parts. All map the memory of node a."""
    os.environ |= {"UCX_TLS": transports, "UCX_NET_DEVICES": "lo"}
    memory, generation = NodeMemory.attach(memory_spec(run_id), writable=False), draw_generation()
    nodes = (SimpleNamespace(name="a"), SimpleNamespace(name=READER))
    run: Any = SimpleNamespace(
        run_id=run_id,
        config=SimpleNamespace(cluster=SimpleNamespace(nodes=nodes)),
        memory_spec=lambda index: memory_spec(run_id),
    )
    agent = Agent(f"{run_id}-{node}-{generation:x}")
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        memoryd = connect(context, offer_to)
        stack.callback(memoryd.close, linger=0)
        listener = Listener(run_id, f"{node}-{transports}")
        stack.callback(listener.close)
        service = FetchService(
            agent=agent,
            serving=Serving(agent, memory, generation),
            listener=listener,
            peers=Peers(agent, run, context),
            memoryd=memoryd,
            metrics=MetricRegistry(FETCH, CollectorRegistry()),
            stopped=pipe.poll,
        )
        pipe.send("serving")
        service.run()


def serve_nixl(memory: NodeMemory, pipe: Connection, transports: str) -> None:
    """Runs memoryd's block server for lookups, and both fetchds."""
    context, run_id = multiprocessing.get_context("spawn"), memory.spec.run_id
    local = ipc_address(run_id, "a", f"bench-{uuid.uuid4().hex}")
    nowhere = ipc_address(run_id, READER, f"bench-{uuid.uuid4().hex}")
    server = BlockServer(run_id=run_id, local_address=local, host=HOST)
    server.start(memory, MemoryMetrics(CollectorRegistry()))
    pids: list[int] = []
    with ExitStack() as stack:
        stack.callback(server.close)
        for node, offer_to in (("a", local), (READER, nowhere)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=fetchd, args=(node, run_id, offer_to, transports, theirs)
            )
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, "end")
            ours.recv()
            pids.append(process.pid or 0)
        pipe.send(NixlAddress(memoryd=server.endpoint, pids=tuple(pids)))
        pipe.recv()


class NixlFetcher:
    """The client that workers and optimizerds use with ``cluster.fetch: nixl``."""

    def __init__(self, address: NixlAddress, run_id: str, transports: str) -> None:
        self._address, self._run_id = address, run_id
        self._client = StagedClient(socket_address(run_id, f"{READER}-{transports}"))

    def fetch(self, block: int, out: np.ndarray[Any, Any]) -> None:
        """Implements :class:`Fetcher`."""
        while True:
            try:
                self._client.fetch(
                    self._address.memoryd,
                    frozen_request(self._run_id, block),
                    memoryview(out),
                    timeout_s=TIMEOUT_S,
                    cancelled=lambda: False,
                )
                return
            except AwayError:
                time.sleep(0.1)  # until the first offer has reached memoryd

    def close(self) -> None:
        """Implements :class:`Fetcher`."""
        self._client.close()


def nixl(transports: str) -> Way:
    """Returns the way with these of UCX's transports."""
    return Way(
        serve=functools.partial(serve_nixl, transports=transports),
        connect=functools.partial(NixlFetcher, transports=transports),
    )


def connect_curve(address: str, run_id: str) -> ZmqFetcher:
    """Returns the same server with keys."""
    return ZmqFetcher(address, run_id, CurveAccess(keys_of(run_id) / "node.b"))


WAYS: Mapping[str, Way] = {
    "raw": Way(serve=serve_raw, connect=lambda address, _: RawFetcher(address)),
    "zmq": Way(serve=serve_zmq, connect=ZmqFetcher),
    "curve": Way(serve=serve_curve, connect=connect_curve),
    "nixl-tcp": nixl("tcp"),
    "nixl-shm": nixl("posix,cma,self,tcp"),
}


def serving(name: str, run_id: str, pipe: Connection) -> None:
    """Runs the serving process of a way."""
    memory = NodeMemory.attach(memory_spec(run_id))
    WAYS[name].serve(memory, pipe)
    memory.close()


def cpu_seconds(pid: int) -> float:
    """Returns CPU time of a process, all threads: the clock of pthread_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way that is ready to fetch."""

    fetcher: Fetcher
    server_pids: tuple[int, ...]

    def round(self, block: int, out: np.ndarray[Any, Any]) -> tuple[float, float]:
        """Fetches a round's arrays; returns seconds and CPU seconds of one fetch."""
        count = max(1, min(ROUND_FETCHES, ROUND_BYTES // SIZES[block]))
        pids = (*self.server_pids, multiprocessing.current_process().pid or 0)
        cpu_s, start = -sum(map(cpu_seconds, pids)), time.perf_counter()
        for _ in range(count):
            self.fetcher.fetch(block, out)
        seconds = time.perf_counter() - start
        return seconds / count, (cpu_s + sum(map(cpu_seconds, pids))) / count


@contextmanager
def opened(names: tuple[str, ...]) -> Iterator[dict[str, Side]]:
    """Yields the memory, and both ends of each way."""
    context, run_id = multiprocessing.get_context("spawn"), uuid.uuid4().hex[:12]
    memory = NodeMemory.create(memory_spec(run_id))
    with ExitStack() as stack:
        stack.callback(memory.unlink)
        make(keys_of(run_id), "bench", ("a", "b"))
        stack.callback(shutil.rmtree, keys_of(run_id))
        for block in range(len(SIZES)):
            memory.frozen(block)[:] = np.arange(SIZES[block] // 2)
        memory.control.set_incarnation(1)
        memory.control.set_epoch(1)
        sides = {}
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(target=serving, args=(name, run_id, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, "end")
            address = ours.recv()
            fetcher = WAYS[name].connect(address, run_id)
            stack.callback(fetcher.close)
            assert process.pid is not None
            pids = (process.pid, *getattr(address, "pids", ()))
            sides[name] = Side(fetcher=fetcher, server_pids=pids)
        yield sides


def measure(names: tuple[str, ...], rounds: int) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yields for each size the (seconds, CPU seconds) of each way's rounds."""
    with opened(names) as sides:
        for block, size in enumerate(SIZES):
            out = np.zeros(size, np.uint8)
            found: dict[str, list[Any]] = {name: [] for name in names}
            for number in range(-1, rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    taken = sides[name].round(block, out)
                    if number >= 0:  # the one before connects, and touches pages
                        found[name].append(taken)
            assert np.array_equal(out.view(np.uint16), np.arange(size // 2).astype(np.uint16))
            yield size, found


def main() -> None:
    """Prints a line for each size and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args()
    names = tuple(given.ways.split(","))
    if find_module() is None and any(name.startswith("nixl") for name in names):
        print("NIXL is not installed (pip install 'penstock[rdma]'): without its rows")
        names = tuple(name for name in names if not name.startswith("nixl"))
    print("| bytes | way | GB/s | of raw | latency us | CPU s/GB |\n" + "| --- " * 6 + "|")
    for size, found in measure(names, given.rounds):
        for name in names:
            seconds = statistics.median(s for s, _ in found[name])
            ratios = [a / b for (a, _), (b, _) in zip(found[names[0]], found[name], strict=True)]
            cpu_s = statistics.median(c for _, c in found[name])
            print(
                f"| {size} | {name} | {size / seconds / 1e9:.2f} | {statistics.median(ratios):.2f}"
                f" | {1e6 * seconds:.0f} | {1e9 * cpu_s / size:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
