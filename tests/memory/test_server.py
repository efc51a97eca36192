"""The block server and its clients, in one process."""

from __future__ import annotations

import dataclasses
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from penstock.daemons.memory import server
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.refill import Partner, refill
from penstock.daemons.memory.server import BlockServer
from penstock.host.errors import ConfigError, LostMemberError, ProtocolError, StateError
from penstock.protocol.run.names import ipc_address
from penstock.protocol.security.authority import make as make_keys
from penstock.protocol.wire import blocks
from penstock.protocol.wire.blocks import BlockClient, FetchCancelledError, attach, request_lease
from penstock.protocol.wire.frames import (
    CHUNK_BYTES,
    MAX_RANGE_BYTES,
    BlockReply,
    BlockRequest,
    LeaseReply,
    LeaseRequest,
    decode,
    encode,
)
from penstock.protocol.wire.sockets import OPEN, CurveAccess, SocketAccess
from penstock.protocol.wire.states import StateReader
from penstock.shm.control import INVALID_VERSION, CommitRecord, Decision, SweepIntent
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.table import DType

BIG_ELEMENTS = 2_200_000  # 8.8 MB of fp32 weights: one whole range and a partial one


class Served:
    """A server with the memory it serves and its metrics."""

    def __init__(self, memory: NodeMemory, access: SocketAccess = OPEN) -> None:
        self.memory = memory
        self.registry = CollectorRegistry()
        self.address = ipc_address(memory.spec.run_id, memory.spec.node_name, "memory")
        self.server = BlockServer(
            run_id=memory.spec.run_id,
            local_address=self.address,
            host="localhost",
            access=access,
        )
        self.server.start(memory, MemoryMetrics(self.registry))

    def request(self, **changes: Any) -> BlockRequest:
        """Weights of block 1 at version 4."""
        fields: dict[str, Any] = {
            "run_id": self.memory.spec.run_id,
            "epoch": 2,
            "attempt": 9,
            "array": "weights",
            "block": 1,
            "version": 4,
            "contribution": 0,
        }
        return BlockRequest(**(fields | changes))

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"penstock_memoryd_{name}", labels) or 0.0


@pytest.fixture
def served(memory: NodeMemory, helpers: Any) -> Iterator[Served]:
    """A server of a small memory at version 4."""
    helpers.fill(memory)
    for block in range(3):
        memory.weights(block, 0)[:] = np.arange(memory.weights(block, 0).size) + block
    helpers.commit(memory, 4)
    found = Served(memory)
    yield found
    found.server.close()
    assert found.server.failure is None


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as found:
        yield found


@pytest.fixture
def client(context: zmq.Context[Any]) -> Iterator[BlockClient]:
    found = BlockClient(context)
    yield found
    found.close()


def test_a_server_that_stands_still_is_stuck_until_it_turns_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server, "_stuck_s", 0.5)
    assert not served.server.stuck
    go_on, stands = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go_on.wait(600.0)

    monkeypatch.setattr(served.server._home, "follow", stand)
    assert stands.wait(600.0)
    time.sleep(0.6)
    assert served.server.stuck
    go_on.set()
    deadline_s = time.monotonic() + 600.0
    while served.server.stuck:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_state_is_read_while_no_sweep_leads_it_on(served: Served, client: BlockClient) -> None:
    """A partner reads words, state, words: equal ones mean that the state is of one version."""
    control, run_id = served.memory.control, served.memory.spec.run_id
    reader, address = StateReader(client, run_id, split=False), served.server.endpoint
    expected = served.memory.state(1, "master")
    master, moments = np.zeros_like(expected), np.zeros_like(expected)

    def read(version: int) -> int:
        arrays = {"exp_avg": moments}
        return reader.arrays(address, 1, version, master, arrays, lambda: False)

    words = reader.words(address, 1, lambda: False)
    assert (words.incarnation, words.state_version) == (control.incarnation, 4)
    assert read(4) == 2 * expected.nbytes
    assert np.array_equal(master, expected)
    assert np.array_equal(moments, served.memory.state(1, "exp_avg"))
    control.begin_sweep(SweepIntent(block=1, state_version=5))
    assert reader.words(address, 1, lambda: False).state_version == INVALID_VERSION
    assert reader.words(address, 0, lambda: False).state_version == 4, "another block's sweep"
    control.set_state_version(1, 5)
    control.end_sweep()
    assert reader.words(address, 1, lambda: False).state_version == 5
    with pytest.raises(ProtocolError, match="state of block 1 is at version 5"):
        read(4)
    with pytest.raises(ProtocolError, match="holds no words"):
        reader.words(address, 2**40, lambda: False)


def test_state_that_a_sweep_leads_on_is_refused_at_once(
    served: Served, client: BlockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held back to the end it would cost a partner the step in which the state can be read."""
    monkeypatch.setattr(server, "HOLD_S", 3600.0)
    monkeypatch.setattr(blocks, "_RESEND_AFTER_S", 3600.0)  # the client asks once
    control = served.memory.control
    control.begin_sweep(SweepIntent(block=1, state_version=5))

    def sweep_on() -> None:
        while not served.value("waiting_requests"):
            time.sleep(0.001)
        control.set_state_version(1, 5)
        control.end_sweep()

    thread = threading.Thread(target=sweep_on)
    thread.start()
    master = np.zeros_like(served.memory.state(1, "master"))
    request = served.request(array="state", version=4, name="master", epoch=0, attempt=0)
    with pytest.raises(ProtocolError, match="state of block 1 is at version 5"):
        client.fetch(served.address, request, master, timeout_s=600.0)
    thread.join()


def test_weights_over_both_sockets(served: Served, client: BlockClient) -> None:
    expected = served.memory.weights(1, 0)
    for address in (served.address, served.server.endpoint):
        out = np.zeros_like(expected)
        client.fetch(address, served.request(), out, timeout_s=600.0)
        assert np.array_equal(out, expected)
    assert served.server.endpoint.startswith("tcp://127.0.0.1:")
    assert served.value("served_bytes_total") == 2 * expected.nbytes
    assert served.value("requests_total", kind="weights", status="ok") == 2


def test_frozen_and_gradients(served: Served, client: BlockClient) -> None:
    frozen = np.zeros(16, np.uint16)
    client.fetch(served.address, served.request(array="frozen"), frozen, timeout_s=600.0)
    assert np.array_equal(frozen, served.memory.frozen(1))
    served.memory.grads(1, 1, 0)[:] = 1.5
    served.memory.control.set_ready(1, 0, epoch=2, attempt=9)
    grads = np.zeros(112, np.float32)
    client.fetch(served.address, served.request(array="grads", version=5), grads, timeout_s=600.0)
    assert set(grads.tolist()) == {1.5}
    # Committed gradients, asked for again after the next attempt filled the other copy.
    served.memory.control.set_ready(1, 0, epoch=2, attempt=10)
    again = served.request(array="grads", version=5, epoch=0)
    client.fetch(served.address, again, grads, timeout_s=600.0)
    # A partner filled the memory between the two: the other copy has nothing any more.
    served.memory.control.set_lost_attempt(9)
    with pytest.raises(ProtocolError, match="attempt 9 were lost with this node's memory"):
        client.fetch(served.address, again, grads, timeout_s=600.0)
    newer = served.request(array="grads", version=6, attempt=10)
    client.fetch(served.address, newer, grads, timeout_s=600.0)


def test_gradients_that_were_waited_for_when_memory_was_lost_are_refused(
    served: Served, client: BlockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HOLD_S", 3600.0)
    monkeypatch.setattr(blocks, "_RESEND_AFTER_S", 3600.0)  # the client asks once
    control = served.memory.control
    control.set_incarnation(0)

    def fill() -> None:
        while not served.value("waiting_requests"):
            time.sleep(0.001)
        control.set_lost_attempt(9)
        control.set_ready(1, 0, epoch=3, attempt=10)
        control.set_incarnation(1)

    thread = threading.Thread(target=fill)
    thread.start()
    wanted, grads = served.request(array="grads", version=5, epoch=0), np.zeros(112, np.float32)
    with pytest.raises(ProtocolError, match="were lost"):
        client.fetch(served.address, wanted, grads, timeout_s=600.0)
    thread.join()


def test_memory_that_a_partner_fills_has_the_commit_and_none_of_its_gradients(
    served: Served, make_run: Any
) -> None:
    memory = NodeMemory.create(make_run().memory_spec(0))
    of_restore = CommitRecord.of_restore(4, served.memory.control.incarnation)
    record = dataclasses.replace(of_restore, attempt=9, decision=Decision.COMMIT)
    partner = Partner(node="a", run_id=served.memory.spec.run_id, access=OPEN)
    endpoint = served.server.endpoint
    refill(memory, partner, endpoint, record, 1, lambda _: None, lambda: False, [0])
    control = memory.control
    assert np.array_equal(memory.state(1, "master"), served.memory.state(1, "master"))
    assert (control.committed, control.generation) == (4, 1)
    assert (control.record(4), control.lost_attempt) == (record, 9)
    memory.close()


@pytest.mark.parametrize("with_keys", [False, True])
def test_large_arrays_arrive_range_by_range(
    make_run: Any, context: zmq.Context[Any], helpers: Any, tmp_path: Path, with_keys: bool
) -> None:
    make_keys(tmp_path / "keys", "run", ("a", "b"))
    accesses = [CurveAccess(tmp_path / "keys" / f"node.{n}") if with_keys else OPEN for n in "ab"]
    client = BlockClient(context, access=accesses[1])
    memory = NodeMemory.create(make_run(elements=BIG_ELEMENTS, dtype=DType.FP32).memory_spec(0))
    memory.weights(1, 0)[:] = np.arange(memory.weights(1, 0).size)
    helpers.commit(memory, 4)
    served = Served(memory, accesses[0])
    try:
        out = np.zeros_like(memory.weights(1, 0))
        assert out.nbytes > MAX_RANGE_BYTES
        client.fetch(served.server.endpoint, served.request(), out, timeout_s=600.0)
        assert np.array_equal(out, memory.weights(1, 0))
        ranges = -(-out.nbytes // MAX_RANGE_BYTES)
        assert served.value("requests_total", kind="weights", status="ok") == ranges
    finally:
        client.close()
        served.server.close()
        memory.close()


def test_a_request_waits_for_the_commit(served: Served, client: BlockClient) -> None:
    control = served.memory.control
    served.memory.weights(1, 1)[:] = 77
    control.set_slot_version(1, 1, 5)

    def commit() -> None:
        while not served.value("waiting_requests"):
            time.sleep(0.001)
        time.sleep(0.12)
        control.set_committed(5)

    thread = threading.Thread(target=commit)
    out = np.zeros(112, np.uint16)
    thread.start()
    started = time.monotonic()
    client.fetch(served.address, served.request(version=5), out, timeout_s=600.0)
    elapsed_s = time.monotonic() - started
    thread.join()
    assert set(out.tolist()) == {77}
    assert elapsed_s >= 0.1
    # Held back 50 ms at a time: a handful of answers, not a busy loop.
    waits = served.value("requests_total", kind="weights", status="wait")
    assert 1 <= waits <= elapsed_s / server.HOLD_S + 1


@pytest.mark.parametrize(
    ("changes", "awaited"),
    [
        ({"version": 5}, "weights of block 1 at version 5"),
        ({"version": 2}, "weights of block 1 at version 2"),
        ({"version": 2**64 - 1}, "weights of block 1 at version 18446744073709551615"),
        (
            {"array": "grads", "attempt": 10},
            "gradients of block 1, contribution 0, membership 2, attempt 10",
        ),
    ],
)
def test_what_never_comes_is_named(
    served: Served, client: BlockClient, changes: dict[str, Any], awaited: str
) -> None:
    served.memory.control.set_ready(1, 0, epoch=2, attempt=9)
    out = bytearray(448 if changes.get("array") == "grads" else 224)
    message = rf"{awaited} from memoryd at .*: 0 of \d+ bytes after 0.15 s \(wait\)"
    with pytest.raises(LostMemberError, match=message):
        client.fetch(served.address, served.request(**changes), out, timeout_s=0.15)


def test_memory_without_a_model_serves_nothing(served: Served, client: BlockClient) -> None:
    served.memory.control.set_incarnation(0)
    for array in ("weights", "frozen"):
        with pytest.raises(LostMemberError):
            client.fetch(
                served.address,
                served.request(array=array),
                bytearray(224 if array == "weights" else 32),
                timeout_s=0.1,
            )


def test_nobody_there_is_a_deadline(context: zmq.Context[Any]) -> None:
    client = BlockClient(context)
    request = BlockRequest(
        run_id="r", epoch=1, attempt=1, array="weights", block=0, version=0, contribution=0
    )
    started = time.monotonic()
    with pytest.raises(LostMemberError, match=r"0 of 8 bytes after 0.2 s \(no answer\)"):
        client.fetch("tcp://127.0.0.1:1", request, bytearray(8), timeout_s=0.2)
    assert time.monotonic() - started >= 0.2
    client.close()


def test_a_fetch_can_be_cancelled_and_the_client_used_again(
    served: Served, client: BlockClient
) -> None:
    out = np.zeros(112, np.uint16)
    asked: list[float] = []

    def cancelled() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 3

    with pytest.raises(FetchCancelledError):
        client.fetch(
            served.address, served.request(version=5), out, timeout_s=600.0, cancelled=cancelled
        )
    client.fetch(served.address, served.request(), out, timeout_s=600.0)
    assert np.array_equal(out, served.memory.weights(1, 0))


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"run_id": "f" * 12}, 224, r"this memoryd serves run \w+, not 'ffffffffffff'"),
        ({"run_id": "x" * 60_000}, 224, "this memoryd serves run"),
        ({"block": 3}, 224, "node a holds no weights"),
        ({"array": "grads", "contribution": 1}, 448, "node a holds no grads"),
        ({"array": "grads", "contribution": 2**63}, 448, "node a holds no grads"),
        ({}, 222, r"has 224 bytes there, expected 222"),
        ({}, 240, r"range \[0, 240\) of weights .*: the array has 224 bytes"),
    ],
)
def test_impossible_requests_are_refused(
    served: Served, client: BlockClient, changes: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        client.fetch(served.address, served.request(**changes), bytearray(size), timeout_s=600.0)


def test_random_frames_never_stop_the_server(
    served: Served, client: BlockClient, context: zmq.Context[Any]
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown when the test fails
    rng = random.Random(seed)
    good = encode(served.request())
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    for socket, address in zip(sockets, (served.address, served.server.endpoint), strict=True):
        socket.set(zmq.LINGER, 500)
        socket.connect(address)
        for _ in range(300):
            mutated = bytearray(good)
            mutated[rng.randrange(len(good))] = rng.randrange(256)
            huge = {"offset": rng.getrandbits(64), "num_bytes": rng.getrandbits(64)}
            choices = [
                [bytes(mutated)],
                [rng.randbytes(rng.randrange(100))],
                [good, good],
                [b""] * rng.randrange(1, 4),
                [encode(served.request(**huge))],
                [encode(served.request(version=rng.getrandbits(64), block=rng.getrandbits(64)))],
                [msgpack.packb([["LeaseRequest"] * 9, {}])],
                [encode(LeaseRequest(run_id="?", member="\u2603" * 99, pid=rng.getrandbits(64)))],
            ]
            socket.send_multipart(rng.choice(choices))
    out = np.zeros(112, np.uint16)
    client.fetch(served.address, served.request(), out, timeout_s=600.0)
    client.fetch(served.server.endpoint, served.request(), out, timeout_s=600.0)
    assert np.array_equal(out, served.memory.weights(1, 0))
    assert served.value("malformed_messages_total") > 50
    assert served.server.failure is None
    for socket in sockets:
        socket.close(linger=0)


def test_oversized_messages_cut_the_connection_only(
    served: Served, client: BlockClient, context: zmq.Context[Any]
) -> None:
    with context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(served.server.endpoint)
        socket.send(bytes(1 << 20))
        time.sleep(0.05)
        client.fetch(
            served.server.endpoint, served.request(), np.zeros(112, np.uint16), timeout_s=600.0
        )


class Liar:
    """A memoryd that answers each request with the next of the given answers."""

    def __init__(self, context: zmq.Context[Any], answers: list[list[bytes]]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 500)
        self.address = f"inproc://{secrets.token_hex(4)}"
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._run, args=(answers,))
        self._thread.start()

    def _run(self, answers: list[list[bytes]]) -> None:
        for frames in answers:
            if self._socket.poll(120_000):
                client, _ = self._socket.recv_multipart()
                self._socket.send_multipart([client, *frames])
        self._socket.close()

    def join(self) -> None:
        self._thread.join()


def reply(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "status": "ok",
        "block": 1,
        "version": 4,
        "offset": 0,
        "num_bytes": 8,
        "array_bytes": 8,
        "error": "",
    }
    return encode(BlockReply(**(fields | changes)))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"nonsense"], "not a message header|expected"),
        ([reply()], "missing or long"),
        ([reply(), b"1234567"], "missing or long"),
        ([reply(), b"123456789"], "missing or long"),
        ([reply(), b"12345678", b"9"], "too many frames"),
        ([reply(block=2), b"12345678"], "an answer for block 2, offset 0"),
        ([reply(offset=8), b"12345678"], "an answer for block 1, offset 8"),
        ([reply(array_bytes=9), b"12345678"], "has 9 bytes there, expected 8"),
    ],
)
def test_a_lying_server_is_a_protocol_error(
    context: zmq.Context[Any], client: BlockClient, frames: list[bytes], message: str
) -> None:
    liar = Liar(context, [frames])
    request = BlockRequest(
        run_id="r", epoch=1, attempt=1, array="weights", block=1, version=4, contribution=0
    )
    with pytest.raises(ProtocolError, match=message):
        client.fetch(liar.address, request, bytearray(8), timeout_s=600.0)
    liar.join()


def test_leases(served: Served, context: zmq.Context[Any]) -> None:
    spec = served.memory.spec
    mine = LeaseRequest(run_id=spec.run_id, member="worker.0", pid=os.getpid())
    answer = request_lease(context, served.address, mine, timeout_s=600.0)
    assert dict(answer.segments) == spec.sizes()
    assert (answer.digest, answer.undo_bytes) == (spec.digest, spec.undo_bytes)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs = LeaseRequest(run_id=spec.run_id, member="worker.1", pid=other.pid)
        request_lease(context, served.address, theirs, timeout_s=600.0)
        assert {lease.member for lease in served.server.leases} == {"worker.0", "worker.1"}
        assert served.value("leases") == 2
        other.communicate(b"\n")
    deadline = time.monotonic() + 600.0
    while served.value("leases") != 1:
        assert time.monotonic() < deadline, "the lease of a dead process was not dropped in 5 s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "ffffffffffff"}, r"serves run \w+, not 'ffffffffffff'"),
        ({"pid": 2**22 + 1}, "no process 4194305 lives on this node"),
    ],
)
def test_refused_leases(
    served: Served, context: zmq.Context[Any], changes: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {
        "run_id": served.memory.spec.run_id,
        "member": "w",
        "pid": os.getpid(),
    }
    with pytest.raises(StateError, match=message):
        request_lease(context, served.address, LeaseRequest(**(fields | changes)), timeout_s=600.0)


def test_memory_that_was_given_back_is_leased_to_nobody(
    served: Served, context: zmq.Context[Any]
) -> None:
    """Who asked while the run ended was told that strangers had removed it, with exit code 2."""
    request = LeaseRequest(run_id=served.memory.spec.run_id, member="worker.0", pid=os.getpid())
    request_lease(context, served.address, request, timeout_s=600.0)
    served.memory.unlink()
    with pytest.raises(LostMemberError, match=r"no lease .* within 0.3 s"):
        request_lease(context, served.address, request, timeout_s=0.3)
    assert not served.server.failure


def test_no_memoryd_no_lease(context: zmq.Context[Any]) -> None:
    request = LeaseRequest(run_id="r", member="worker.0", pid=os.getpid())
    with pytest.raises(LostMemberError, match=r"worker.0: no lease .* within 0.1 s"):
        request_lease(context, "ipc://@penstock-nobody", request, timeout_s=0.1)


def test_a_lease_that_a_dead_memoryd_had_been_asked_for_is_asked_for_again(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first memoryd takes the request and dies; its successor has the same address."""
    monkeypatch.setattr(blocks, "_RESEND_AFTER_S", 0.2)
    address = f"ipc://@penstock-test-lease-again-{os.getpid()}"
    reply = LeaseReply(segments=(), digest=b"", undo_bytes=0, error="")

    def serve() -> None:
        for answers in (False, True):
            # The end of a context, as of a process, is when its sockets have let go of the address.
            with zmq.Context() as process, process.socket(zmq.ROUTER) as router:
                router.set(zmq.LINGER, 1000)
                router.bind(address)
                client, _ = router.recv_multipart()
                if answers:
                    router.send_multipart([client, encode(reply)])

    server = threading.Thread(target=serve)
    server.start()
    request = LeaseRequest(run_id="0123456789ab", member="worker.0", pid=os.getpid())
    try:
        assert request_lease(context, address, request, timeout_s=600.0) == reply
    finally:
        server.join()


def test_attach_maps_what_the_server_owns(make_run: Any, helpers: Any) -> None:
    run = make_run()
    memory = NodeMemory.create(run.memory_spec(0))
    helpers.commit(memory, 4)
    served = Served(memory)
    try:
        mine = attach(run, 0, "worker.0", timeout_s=600.0, kinds=(SegmentKind.WEIGHTS,))
        memory.weights(0, 0)[:] = 5
        assert set(mine.weights(0, 0).tolist()) == {5}
        assert mine.control.committed == 4
        mine.close()
        os.unlink("/dev/shm" + run.memory_spec(0).name(SegmentKind.STATE))
        with pytest.raises(StateError, match=r"memory of node a was removed from /dev/shm"):
            attach(run, 0, "worker.0", timeout_s=600.0)
    finally:
        served.server.close()
        memory.close()


def test_requests_that_came_before_the_start_are_answered(
    memory: NodeMemory, context: zmq.Context[Any]
) -> None:
    address = ipc_address(memory.spec.run_id, "a", "memory")
    server = BlockServer(run_id=memory.spec.run_id, local_address=address, host="127.0.0.1")
    with context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        request = LeaseRequest(run_id=memory.spec.run_id, member="w", pid=os.getpid())
        socket.send(encode(request))
        assert not socket.poll(50)
        server.start(memory, MemoryMetrics(CollectorRegistry()))
        assert socket.poll(120_000)
    server.close()


def test_only_one_memoryd_a_node(served: Served) -> None:
    with pytest.raises(StateError, match="another memoryd of this run is alive"):
        BlockServer(
            run_id=served.memory.spec.run_id, local_address=served.address, host="127.0.0.1"
        )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    address = ipc_address(secrets.token_hex(6), "a", "memory")
    with pytest.raises(ConfigError, match=rf"cluster.nodes host '{host}'"):
        BlockServer(run_id="r", local_address=address, host=host)


def test_chunks_are_what_the_frames_say() -> None:
    assert MAX_RANGE_BYTES % CHUNK_BYTES == 0
    assert decode(reply(), BlockReply).array_bytes == 8
