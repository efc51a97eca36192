"""Two real fetchds over TCP: reads, a writer that never rests, kills, and who may connect."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from penstock.daemons.fetch.agent import find_module, why_not
from penstock.daemons.fetch.peers import Peers
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.host.errors import LostMemberError, ProtocolError
from penstock.host.stopping import stop_signals_blocked
from penstock.protocol.run.names import ipc_address
from penstock.protocol.wire.blocks import BlockClient, FetchCancelledError
from penstock.protocol.wire.fetching import OneSidedFetcher
from penstock.protocol.wire.frames import (
    AgentOffer,
    AgentReply,
    AgentRequest,
    BlockRequest,
    decode,
    encode,
)
from penstock.protocol.wire.sockets import OpenAccess, SocketAccess, socket_access
from penstock.protocol.wire.staged import SLOT_BYTES, AwayError, StagedClient, socket_address
from penstock.shm.control import INVALID_VERSION
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType

ELEMENTS = 2_500_000  # 10 MB of fp32: three ranges
OVER_TCP = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}

pytestmark = pytest.mark.skipif(find_module() is None, reason="NIXL is not installed: [rdma]")


class Pair:
    """Nodes a and b: memory, block servers, and a fetchd each; b owns blocks 0 and 1."""

    def __init__(self, run: Any, helpers: Any, stack: ExitStack) -> None:
        self.run = run
        self.stack = stack
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.servers: dict[str, BlockServer] = {}
        self.memory: dict[str, NodeMemory] = {}
        for index, node in enumerate("ab"):
            memory = NodeMemory.create(run.memory_spec(index))
            stack.callback(memory.close)
            helpers.commit(memory, 4)
            memory.control.set_epoch(2)
            self.memory[node] = memory
            address = ipc_address(run.run_id, node, "memory")
            access = socket_access(run.config, run.path, node)
            server = BlockServer(
                run_id=run.run_id, local_address=address, host="127.0.0.1", access=access
            )
            stack.callback(server.close)
            server.start(memory, MemoryMetrics(CollectorRegistry()))
            self.servers[node] = server
            self.start(node)

    def access(self) -> SocketAccess:
        return socket_access(self.run.config, self.run.path, "a")

    def start(self, node: str) -> None:
        words = ["-m", "penstock.client.launch", "fetchd", "--node", node]
        words += [
            "--config",
            str(self.run.path / "resolved.yaml"),
            "--parent-pid",
            str(os.getpid()),
        ]
        with stop_signals_blocked():
            process = subprocess.Popen([sys.executable, *words], env=OVER_TCP)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        self.processes[node] = process

    def mend(self) -> None:
        """Start again who has ended, as a node does: UCX aborts at times when a peer was killed."""
        for node, process in self.processes.items():
            if process.poll() is not None:
                self.start(node)

    def request(self, **changes: Any) -> BlockRequest:
        fields: dict[str, Any] = {
            "run_id": self.run.run_id,
            "epoch": 2,
            "attempt": 9,
            "array": "weights",
            "block": 1,
            "version": 4,
            "contribution": 0,
        }
        return BlockRequest(**(fields | changes))

    def client(self) -> StagedClient:
        client = StagedClient(socket_address(self.run.run_id, "a"))
        self.stack.callback(client.close)
        return client

    def fetch(self, client: StagedClient, out: Any, timeout_s: float = 10.0, **of: Any) -> None:
        client.fetch(
            self.servers["b"].endpoint,
            self.request(**of),
            memoryview(out).cast("B"),
            timeout_s=timeout_s,
            cancelled=lambda: False,
        )

    def fetch_when_there(self, client: StagedClient, out: Any, **of: Any) -> None:
        deadline_s = time.monotonic() + 600.0
        while True:
            try:
                self.fetch(client, out, **of)
                return
            except AwayError:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)


@pytest.fixture
def pair(make_run: Any, helpers: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(make_run(nodes=2, elements=ELEMENTS, dtype=DType.FP32), helpers, stack)


def test_arrays_of_another_node_are_read_whole_or_not_at_all(pair: Pair) -> None:
    memory, client = pair.memory["b"], pair.client()
    weights, out = memory.weights(1, 0), np.zeros(memory.weights(1, 0).size, np.float32)
    assert out.nbytes > 2 * SLOT_BYTES
    weights[:] = np.arange(weights.size)
    pair.fetch_when_there(client, out)
    assert np.array_equal(out, weights)

    memory.frozen(1)[:] = 3
    memory.control.begin_frozen(1)
    memory.control.end_frozen(1)
    frozen = np.zeros(memory.frozen(1).size, np.float32)
    pair.fetch(client, frozen, array="frozen")
    assert set(frozen.tolist()) == {3.0}

    grads = memory.grads(1, 1, 0)
    memory.control.begin_gradients(1, 1, 0)
    grads[:] = 1.5
    with pytest.raises(LostMemberError, match="0 of"):
        pair.fetch(client, out, timeout_s=0.3, array="grads", version=5)
    memory.control.end_gradients(1, 1, 0)
    memory.control.set_ready(1, 0, epoch=2, attempt=9)
    pair.fetch(client, out, array="grads", version=5)
    assert set(out.tolist()) == {1.5}
    with pytest.raises(FetchCancelledError):
        client.fetch(
            pair.servers["b"].endpoint,
            pair.request(version=6),
            memoryview(out).cast("B"),
            timeout_s=9.0,
            cancelled=lambda: True,
        )
    check_against_a_writer(pair, client)
    check_who_may_connect(pair)


def check_against_a_writer(pair: Pair, client: StagedClient) -> None:
    """Whatever is read is of one sweep, though the version is always the same."""
    memory, stop = pair.memory["b"], threading.Event()

    def sweep() -> None:
        number = 0
        while not stop.is_set():
            memory.control.set_slot_version(1, 0, INVALID_VERSION)
            memory.weights(1, 0)[:] = number
            memory.control.set_slot_version(1, 0, 4)
            number += 1
            time.sleep(0.0 if number % 4 else 0.3 + 0.02 * number)  # on busy machines, too

    writer = threading.Thread(target=sweep)
    writer.start()
    seen, misses = set(), 0
    out = np.zeros(memory.weights(1, 0).size, np.float32)
    try:
        deadline_s = time.monotonic() + 600.0
        while len(seen) < 3 and time.monotonic() < deadline_s:
            try:
                pair.fetch(client, out, timeout_s=2.0)
            except LostMemberError:
                misses += 1
                continue
            found = set(out.tolist())
            assert len(found) == 1
            seen |= found
    finally:
        stop.set()
        writer.join()
    assert len(seen) >= 2, f"{misses} fetches found no quiet moment"


def refused_as_nobody(address: str) -> bool:
    """Whether another user's process cannot even connect; the calling thread stays that user's."""
    set_user = 117  # setresuid on x86-64: the system call changes one thread, C's function all
    assert ctypes.CDLL(None).syscall(set_user, -1, 65534, -1) == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(600.0)
        try:
            asking.connect(address)
        except PermissionError:
            return True
    return False


def check_who_may_connect(pair: Pair) -> None:
    """Nobody else's process; an offer counts from a process of the node only."""
    address = socket_address(pair.run.run_id, "a")
    if os.getuid() == 0:
        refused: list[bool] = []
        stranger = threading.Thread(target=lambda: refused.append(refused_as_nobody(address)))
        stranger.start()
        stranger.join()
        assert refused == [True]  # the folder is this user's alone
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
        rude.connect(address)
        rude.send(b"\xc1 not a request")
        rude.settimeout(600.0)
        assert rude.recv(4096)  # its staging memory; then nothing any more
        assert rude.recv(4096) == b""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        pair.access().connect(peer, pair.servers["b"].endpoint)
        lie = AgentOffer(
            run_id=pair.run.run_id,
            node="b",
            pid=os.getpid(),
            generation=1,
            metadata=b"",
            identity=0,
            segments=(),
            digest=b"",
        )
        peer.send(encode(lie))
        peer.send(encode(AgentRequest(run_id=pair.run.run_id, generation=0)))
        assert peer.poll(120_000)
        reply = decode(peer.recv(), AgentReply)
        assert [offer.pid for offer in reply.offers] == [pair.processes["b"].pid]


def test_fetchds_may_die_at_any_time(pair: Pair) -> None:
    """Fetches come by ZeroMQ meanwhile; a fetchd that is there again is met again."""
    memory, ways = pair.memory["b"], list[str]()
    weights = memory.weights(1, 0)
    weights[:] = np.arange(weights.size)
    out = np.zeros_like(weights)
    with zmq.Context() as context:
        blocks = BlockClient(context, access=pair.access())
        fetcher = OneSidedFetcher(
            pair.client(),
            blocks,
            None,
            lambda way, num_bytes, seconds: ways.append(way),
        )

        def fetch_until(way: str) -> None:
            deadline_s = time.monotonic() + 600.0
            while not ways or ways[-1] != way:
                assert time.monotonic() < deadline_s, ways
                if way == "nixl":
                    pair.mend()
                out[:] = 0
                fetcher.fetch(pair.servers["b"].endpoint, pair.request(), out, timeout_s=10.0)
                assert np.array_equal(out, weights)
                time.sleep(0.02)

        fetch_until("nixl")
        for node in ("b", "a"):
            timer = threading.Timer(0.01, pair.processes[node].send_signal, [signal.SIGKILL])
            timer.start()
            fetch_until("zmq")
            timer.join()
            pair.processes[node].wait()
            fetch_until("nixl")
        fetcher.close()


class NoKeys(OpenAccess):
    """An access that finds no key of the peer's."""

    def connect(self, socket: Any, address: str) -> None:
        raise ProtocolError(f"{address}: it names no key")


def test_a_peer_whose_address_names_no_key_is_not_asked(make_run: Any) -> None:
    with zmq.Context() as context:
        peers = Peers(Mock(), make_run(nodes=2), context, NoKeys())
        peer = peers.find("tcp://127.0.0.1:9", 100.0)
        assert (peer.socket, peer.asked_s) == (None, None)
        assert peer.why == "tcp://127.0.0.1:9: it names no key"
        assert peers.find("tcp://127.0.0.1:9", 100.1) is peer


def test_where_there_is_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(asked_for=True) == ""
    assert "no RDMA device" in why_not(asked_for=False, infiniband=tmp_path / "none")
    (tmp_path / "mlx5_0").mkdir()
    assert why_not(asked_for=False, infiniband=tmp_path) == ""
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    assert "is not installed" in why_not(asked_for=True)


@pytest.mark.integration
def test_a_peer_that_is_silent_is_given_up_and_met_again(pair: Pair) -> None:
    """A stopped process is what a cut network looks like: no error ever comes."""
    memory, client, other = pair.memory["b"], pair.client(), pair.client()
    memory.weights(1, 0)[:] = 1.0
    out = np.zeros(memory.weights(1, 0).size, np.float32)
    pair.fetch_when_there(client, out)
    pair.processes["b"].send_signal(signal.SIGSTOP)
    memory.control.set_slot_version(1, 0, INVALID_VERSION)
    memory.weights(1, 0)[:] = 2.0
    memory.control.set_slot_version(1, 0, 4)
    start_s = time.monotonic()
    with pytest.raises(AwayError, match="silent for 4 s"):
        pair.fetch(client, out)
    waited_s = time.monotonic() - start_s
    with pytest.raises(AwayError):  # at once: nobody waits for it twice
        pair.fetch(other, out)
    assert time.monotonic() - start_s < 2 * waited_s
    pair.processes["b"].send_signal(signal.SIGCONT)
    assert pair.processes["a"].poll() is None
    pair.fetch_when_there(client, out)
    assert set(out.tolist()) == {2.0}
    print(f"a silent fetchd was given up after {waited_s:.1f} s, and met again when it was back")
