"""Sockets between workers: whole tensors arrive, and nothing else does any harm."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.host.errors import LostMemberError, ProtocolError
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.wire.frames import GradientReady, TensorHeader, Transfer, decode, encode
from penstock.workers.channels.inbox import Expected, Inbox, TransferKey
from penstock.workers.channels.tensors import DTYPES, from_frames, to_frames
from penstock.workers.channels.transport import Transport
from penstock.workers.data import job_number
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.waiting import Abort, Interrupted
from tests.worker.ending import ended_by

RUN_ID = "0123456789ab"
PROGRAM = "device 0:\n" + "\n".join(f"  RA 0 {m} peer=0; RG 1 {m} peer=0" for m in range(4))


def header(**changes: Any) -> Transfer:
    fields = Transfer(
        run_id=RUN_ID,
        epoch=3,
        phase="train",
        attempt=5,
        kind="activation",
        stage=0,
        micro_batch=0,
        tensors=(),
    )
    return replace(fields, **changes)


class Pair:
    """A sender and a receiver."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.receiver = self._transport(self.registry)
        self.sender = self._transport(CollectorRegistry())
        self.sender.connect({1: self.receiver.address}, {})
        self.abort = Abort()
        program = parse_program(PROGRAM)[0]
        self.receiver.inbox.open(
            run_id=RUN_ID, epoch=3, expected=Expected.of(program, program[:2], 2, first_attempt=5)
        )

    @staticmethod
    def _transport(registry: CollectorRegistry) -> Transport:
        address = f"ipc://@penstock-test-{uuid.uuid4().hex}"
        return Transport(address, Inbox(), WorkerMetrics(registry))

    def send(self, tensors: dict[str, torch.Tensor], **changes: Any) -> None:
        self.sender.send(1, header(**changes), tensors, self.abort, 5.0)

    def take(self, **changes: Any) -> dict[str, torch.Tensor]:
        return self.receiver.inbox.take(TransferKey.of(header(**changes)), self.abort, 5.0)

    def dropped(self, reason: str) -> float:
        name = "penstock_dropped_messages_total"
        return self.registry.get_sample_value(name, {"reason": reason}) or 0.0

    def wait_dropped(self, reason: str, count: int) -> None:
        deadline = time.monotonic() + 600.0
        while self.dropped(reason) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.dropped(reason) == count


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.sender.close()
    made.receiver.close()


def test_tensors_arrive_equal_and_aligned(pair: Pair) -> None:
    sent = {
        "hidden": torch.randn(2, 3000, 32),
        "transposed": torch.randn(7, 5).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False]),
        "wide": torch.arange(5),
        "half": torch.randn(9).to(torch.bfloat16),
        "small": torch.randn(9).to(torch.float16),
        "whole": torch.arange(3, dtype=torch.int32),
    }
    assert {t.dtype for t in sent.values()} == set(DTYPES.values())
    pair.send(sent, micro_batch=2)
    found = pair.take(micro_batch=2)
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % 64 == 0


def test_buffers_alias_contiguous_tensors() -> None:
    tensor = torch.zeros(4)
    _, (buffer,) = to_frames({"hidden": tensor})
    tensor[0] = 1.0
    assert bytes(buffer) == tensor.numpy().tobytes()


def test_types_that_cannot_travel_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"tensor 'z': torch\.complex64 cannot be sent"):
        to_frames({"z": torch.zeros(1, dtype=torch.complex64)})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": 2}, "stale"),
        ({"epoch": 4}, "stale"),
        ({"run_id": "ba9876543210"}, "stale"),
        ({"stage": 1}, "unexpected"),
        ({"kind": "checkpoint"}, "unexpected"),
        ({"micro_batch": 4}, "unexpected"),
        ({"phase": "eval", "micro_batch": 1}, "unexpected"),
    ],
)
def test_messages_of_others_are_dropped(pair: Pair, changes: Any, reason: str) -> None:
    pair.send({"hidden": torch.ones(2)}, **changes)
    pair.wait_dropped(reason, 1)
    assert len(pair.receiver.inbox) == 0
    pair.send({"hidden": torch.ones(2)})
    assert torch.equal(pair.take()["hidden"], torch.ones(2))


def test_a_doubled_message_is_dropped(pair: Pair) -> None:
    pair.send({"hidden": torch.zeros(2)})
    pair.send({"hidden": torch.ones(2)})
    pair.wait_dropped("doubled", 1)
    assert torch.equal(pair.take()["hidden"], torch.zeros(2))


def test_only_attempts_that_can_come_are_kept(pair: Pair) -> None:
    """What a peer claims of the future takes no room from what comes."""
    for attempt in range(352):
        pair.send({"hidden": torch.zeros(2)}, attempt=attempt)
    pair.wait_dropped("other_attempt", 350)
    assert len(pair.receiver.inbox) == 2
    for micro_batch in range(1, 4):
        pair.send({"hidden": torch.ones(2)}, micro_batch=micro_batch)
    for micro_batch in range(4):
        pair.take(micro_batch=micro_batch)
    assert len(pair.receiver.inbox) == 1
    pair.receiver.inbox.begin("train", 6)
    pair.send({"hidden": torch.ones(2)}, attempt=5, micro_batch=3)
    pair.wait_dropped("other_attempt", 351)
    pair.send({"hidden": torch.ones(2)}, attempt=7)
    assert torch.equal(pair.take(attempt=7)["hidden"], torch.ones(2))
    assert torch.equal(pair.take(attempt=6)["hidden"], torch.zeros(2))


def test_only_evaluations_that_can_come_are_kept(pair: Pair) -> None:
    eval_ = {"phase": "eval"}
    for evaluation in range(8):
        for batch in range(5):
            number = job_number(evaluation, batch)
            pair.send({"hidden": torch.zeros(1)}, attempt=number, **eval_)
    pair.wait_dropped("other_attempt", 36)
    assert {key.attempt for key in pair.receiver.inbox.leftovers("eval", job_number(1, 0))} == {
        job_number(1, 0)
    }
    assert len(pair.receiver.inbox) == 4, "two evaluations of two batches"
    pair.receiver.inbox.begin("eval", job_number(2, 0))
    assert len(pair.receiver.inbox) == 2, "what nobody took of an older one is gone"


def test_a_transfer_that_was_taken_does_not_come_again(pair: Pair) -> None:
    for attempt in (5, 6):
        pair.send({"hidden": torch.zeros(2)}, attempt=attempt)
        pair.take(attempt=attempt)
        pair.send({"hidden": torch.ones(2)}, attempt=attempt)
        pair.receiver.inbox.begin("train", attempt)
    pair.wait_dropped("doubled", 2)
    assert len(pair.receiver.inbox) == 0


def test_the_next_attempt_may_arrive_early(pair: Pair) -> None:
    pair.send({"hidden": torch.ones(1)}, attempt=6)
    pair.send({"hidden": torch.zeros(1)}, attempt=5)
    assert torch.equal(pair.take(attempt=5)["hidden"], torch.zeros(1))
    assert pair.receiver.inbox.leftovers("train", 5) == ()
    assert [str(key) for key in pair.receiver.inbox.leftovers("train", 6)] == [
        "activation of stage 0, micro-batch 0 (train 6)"
    ]


def raw_sender(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    return socket


def _valid(**changes: Any) -> bytes:
    return encode(header(**changes))


NONSENSE: list[list[bytes]] = [
    [b""],
    [b"\xff" * 100],
    [b"x" * 100_000],
    [msgpack.packb(["Transfer", {}])],
    [msgpack.packb(["Transfer", {"run_id": 3}])],
    [encode(GradientReady(run_id=RUN_ID, epoch=3, attempt=5, block=0, contribution=0))],
    [_valid(), b"a buffer too many"],
    [_valid(tensors=(TensorHeader(name="h", dtype="fp32", shape=(4,)),))],
    [_valid(tensors=(TensorHeader(name="h", dtype="fp32", shape=(4,)),)), b"short"],
    [_valid(tensors=(TensorHeader(name="h", dtype="fp32", shape=(2**40, 2**40)),)), b""],
    [_valid(tensors=(TensorHeader(name="h", dtype="fp32", shape=(0, 2**63, 2**63)),)), b""],
    [_valid(tensors=(TensorHeader(name="h", dtype="object", shape=(1,)),)), b"12345678"],
    [_valid(tensors=(TensorHeader(name="h", dtype="bool", shape=(1,) * 9),)), b"1"],
    [_valid(tensors=(TensorHeader(name="h", dtype="bool", shape=(1,)),) * 2), b"1", b"1"],
    [_valid(), *[b""] * 100],
]


@pytest.mark.parametrize("number", range(len(NONSENSE)))
def test_nonsense_is_dropped_and_counted(pair: Pair, number: int) -> None:
    with zmq.Context() as context:
        socket = raw_sender(context, pair.receiver.address)
        socket.send_multipart(NONSENSE[number])
        pair.wait_dropped("malformed", 1)
        socket.close()
    pair.send({"hidden": torch.ones(1)})
    assert torch.equal(pair.take()["hidden"], torch.ones(1))


def test_random_bytes_do_no_harm(pair: Pair) -> None:
    """Any frames, and valid headers with any frames after them."""
    frames = st.lists(st.binary(max_size=200), min_size=1, max_size=5)
    headers = st.sampled_from([_valid(), *(n[0] for n in NONSENSE)])
    context = zmq.Context()
    socket = raw_sender(context, pair.receiver.address)

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(frames, st.one_of(st.none(), headers))
    def send(body: list[bytes], first: bytes | None) -> None:
        socket.send_multipart(body if first is None else [first, *body])

    send()
    pair.send({"hidden": torch.ones(1)}, micro_batch=3)
    assert torch.equal(pair.take(micro_batch=3)["hidden"], torch.ones(1))
    socket.close()
    context.term()


def test_a_full_inbox_whose_sender_has_gone_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq checks the end of its context at every hundredth message. Then the inbox is closed
    with untaken messages, and libzmq no longer has a descriptor of their sender.
    """
    pair = Pair()
    pair.sender.close()
    count, is_last, is_closing = 0, threading.Event(), threading.Event()

    def drop(reason: str) -> None:
        nonlocal count
        count += 1
        if count < 100:
            time.sleep(0.002)  # the next messages are there: libzmq counts on
        elif count == 100:
            is_last.set()
            is_closing.wait(600.0)

    monkeypatch.setattr(pair.receiver.metrics, "dropped", drop)
    with zmq.Context() as context:
        socket = raw_sender(context, pair.receiver.address)
        for _ in range(300):
            socket.send(b"")
        socket.close()
    assert is_last.wait(600.0)
    closing = threading.Thread(target=pair.receiver.close, daemon=True)
    closing.start()
    time.sleep(0.2)  # the context has told the inbox of its end
    is_closing.set()
    closing.join(timeout=600.0)
    assert not closing.is_alive(), "libzmq waits for a connection that has ended"


@given(st.binary(max_size=64), st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_decoding_buffers_gives_tensors_or_a_protocol_error(
    data: bytes, shape: tuple[int, ...]
) -> None:
    description = TensorHeader(name="h", dtype="bf16", shape=shape)
    try:
        found = from_frames([description], [memoryview(data)])["h"]
    except ProtocolError:
        assert torch.Size(shape).numel() * 2 != len(data)
    else:
        assert found.shape == shape


def test_a_full_queue_ends_at_the_deadline_or_the_abort(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.channels.connections.QUEUED_MESSAGES", 2)
    pair.sender.connect({1: "ipc://@penstock-test-nobody-listens"}, {})
    for _ in range(2):
        pair.send({"hidden": torch.zeros(1)})
    error = ended_by(lambda: pair.sender.send(1, header(), {}, pair.abort, 0.1))
    assert isinstance(error, LostMemberError)
    assert str(error).startswith("waited 0.1 s for room in the queue to worker 1")
    threading.Timer(0.1, pair.abort.set, ["drained"]).start()
    error = ended_by(lambda: pair.sender.send(1, header(), {}, pair.abort, 60.0))
    assert isinstance(error, Interrupted)


def test_an_unknown_peer_is_an_error(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="no connection for room in the queue to worker 2"):
        pair.sender.send(2, header(), {}, pair.abort, 1.0)


def test_disconnecting_drops_what_was_not_sent(pair: Pair) -> None:
    pair.sender.connect({1: "ipc://@penstock-test-nobody-listens"}, {})
    pair.send({"hidden": torch.zeros(1)})
    pair.sender.disconnect()  # else it would wait for good


def test_notifications_reach_the_optimizer_of_the_node(pair: Pair) -> None:
    message = GradientReady(run_id=RUN_ID, epoch=3, attempt=5, block=7, contribution=1)
    with zmq.Context() as context:
        sockets = [context.socket(zmq.PULL) for _ in range(2)]
        addresses = {}
        for node, socket in enumerate(sockets):
            addresses[node] = f"ipc://@penstock-test-{uuid.uuid4().hex}"
            socket.bind(addresses[node])
        pair.sender.connect({}, addresses)
        pair.sender.notify(1, message, pair.abort, 1.0)
        assert sockets[1].poll(120_000)
        assert decode(sockets[1].recv(), GradientReady) == message
        assert not sockets[0].poll(10)
        for socket in sockets:
            socket.close()
