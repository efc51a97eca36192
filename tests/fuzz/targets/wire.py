"""What comes over ZeroMQ and local sockets."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import torch
import zmq
from prometheus_client import CollectorRegistry

from penstock.daemons.fetch.clients import Client
from penstock.daemons.fetch.reads import Places
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.daemons.monitor.metrics.exposition import MergedExposition
from penstock.daemons.monitor.metrics.scrape import _Request
from penstock.daemons.optimizer.inbox import GradientSocket, Inbox
from penstock.daemons.optimizer.metrics import OptimizerMetrics
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.run.metrics_socket import LENGTH_BYTES
from penstock.protocol.wire.blocks import _Fetch
from penstock.protocol.wire.frames import (
    STATE_WORDS_BYTES,
    AgentOffer,
    AgentReply,
    AgentRequest,
    BlockReply,
    BlockRequest,
    BlockUpdated,
    GradientReady,
    GroupAddress,
    Header,
    LeaseReply,
    LeaseRequest,
    ReadReply,
    ReadRequest,
    Staging,
    StateWords,
    TensorHeader,
    Transfer,
    TransferShape,
    decode,
    encode,
)
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory
from penstock.shm.words import _BLOCK, _HEADER, CopiedWords
from penstock.workers.channels.inbox import Expected, Notices
from penstock.workers.channels.inbox import Inbox as TensorInbox
from penstock.workers.channels.tensors import Packing, to_frames
from penstock.workers.channels.transport import Transport
from penstock.workers.telemetry.metrics import WorkerMetrics
from tests.fuzz.mutating import in_pieces, joined
from tests.fuzz.target import Decoder, Form, Target, plainly
from tests.fuzz.targets.material import RUN_ID, forget, memory_spec

KINDS: tuple[Any, ...] = typing.get_args(Header)


def block_request(**changes: Any) -> BlockRequest:
    """Weights of block 1, as a worker asks for them."""
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "epoch": 2,
        "attempt": 9,
        "array": "weights",
        "block": 1,
        "version": 4,
        "contribution": 0,
        "offset": 0,
        "num_bytes": 16,
    }
    return BlockRequest(**(fields | changes))


def offer() -> AgentOffer:
    """What a fetchd offers."""
    return AgentOffer(
        run_id=RUN_ID,
        node="a",
        pid=1,
        generation=77,
        metadata=b"nixl" * 10,
        identity=4096,
        segments=(("control", 8192, 1 << 20), ("weights", 1 << 22, 1 << 20)),
        digest=bytes(32),
    )


TENSORS = (
    TensorHeader(name="hidden", dtype="fp32", shape=(2, 3)),
    TensorHeader(name="mask", dtype="bool", shape=(4,)),
)


def transfer(**changes: Any) -> Transfer:
    """An activation, of epoch 3 and attempt 5."""
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "epoch": 3,
        "phase": "train",
        "attempt": 5,
        "kind": "activation",
        "stage": 0,
        "micro_batch": 0,
        "tensors": TENSORS,
    }
    return Transfer(**(fields | changes))


HEADERS: tuple[Header, ...] = (
    transfer(),
    GroupAddress(run_id=RUN_ID, epoch=3, port=4711),
    TransferShape(
        run_id=RUN_ID, epoch=3, sender=0, phase="train", kind="gradient", stage=1, tensors=TENSORS
    ),
    GradientReady(run_id=RUN_ID, epoch=3, attempt=5, block=1, contribution=0),
    BlockUpdated(
        run_id=RUN_ID,
        epoch=3,
        attempt=5,
        block=1,
        version=2,
        finite=True,
        sum_squares=0.5,
        seconds=0.25,
    ),
    LeaseRequest(run_id=RUN_ID, member="worker.0", pid=1),
    LeaseReply(segments=(("/penstock-x", 4096),), digest=bytes(32), undo_bytes=1000, error=""),
    block_request(),
    block_request(array="grads", num_bytes=0),
    block_request(array="frozen"),
    block_request(array="words", num_bytes=0),
    block_request(array="state", name="master"),
    BlockReply(status="ok", block=1, version=4, offset=0, num_bytes=16, array_bytes=32, error=""),
    offer(),
    AgentRequest(run_id=RUN_ID, generation=77),
    AgentReply(offers=(offer(),), error=""),
    Staging(generation=77, slots=4, slot_bytes=4096),
    ReadRequest(serial=1, address="tcp://10.0.0.1:4711", slot=0, block=block_request()),
    ReadReply(serial=1, status="ok", incarnation=1, sequence=2, error=""),
)


def headers(*kinds: type) -> list[bytes]:
    """Returns the header frames of some kinds."""
    return [encode(header) for header in HEADERS if isinstance(header, kinds)]


def _header(data: bytes) -> None:
    found = decode(data, *KINDS)
    again = decode(encode(found), type(found))
    assert repr(again) == repr(found)  # a NaN is not equal to itself


def _tensor_frames() -> list[bytes]:
    tensors = {"hidden": torch.arange(6.0).reshape(2, 3), "mask": torch.ones(4, dtype=torch.bool)}
    made, buffers = to_frames(tensors)
    content = [bytes(buffer) for buffer in buffers]
    shape = TransferShape(
        run_id=RUN_ID, epoch=3, sender=1, phase="train", kind="gradient", stage=1, tensors=made
    )
    return [
        joined(encode(transfer(tensors=made)), *content),
        joined(encode(transfer(epoch=2, tensors=made)), *content),
        joined(encode(transfer(attempt=6, kind="gradient", stage=1, tensors=made)), *content),
        joined(encode(shape)),
        joined(*headers(GroupAddress)),
    ]


@contextmanager
def _worker_inbox(folder: Path) -> Iterator[Decoder]:
    """A worker's inbox in an epoch, without its sockets: nothing gets in that is not awaited."""
    del folder
    program = parse_program("device 0:\n  RA 0 0 peer=0; RG 1 0 peer=0")[0]
    inbox, notices = TensorInbox(), Notices()
    drop = lambda reason, detail: None  # noqa: E731
    stub: Any = SimpleNamespace(
        inbox=inbox, notices=notices, metrics=WorkerMetrics(CollectorRegistry()), _drop=drop
    )
    expected = Expected.of(program, program, 2, first_attempt=5)

    def take(data: bytes) -> None:
        inbox.open(run_id=RUN_ID, epoch=3, expected=expected)
        notices.open(run_id=RUN_ID, epoch=3)
        frames = [zmq.Frame(piece) for piece in in_pieces(data)] or [zmq.Frame(b"")]
        Transport._accept(stub, frames)
        for key in inbox._tensors:
            assert key.attempt in (5, 6) and key.kind in ("activation", "gradient"), key

    yield take


def _packed(data: bytes) -> None:
    header, *rest = in_pieces(data) or [b""]
    shape = decode(header, TransferShape)
    packing = Packing(shape.tensors)
    if packing.num_bytes <= 1 << 20:
        content = b"".join(rest)[: packing.num_bytes].ljust(packing.num_bytes, b"\0")
        packing.unpack(torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8))


class Router:
    """The socket of a server: one message waits, answers are kept."""

    def __init__(self) -> None:
        self.waiting: list[list[bytes]] = []
        self.sent: list[Any] = []

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        """The next message."""
        if not self.waiting:
            raise zmq.Again
        return [zmq.Frame(frame) for frame in self.waiting.pop(0)]

    def send_multipart(self, frames: Sequence[Any], copy: bool = True) -> None:
        """Keeps an answer."""
        self.sent.append(frames)


@contextmanager
def _memoryd(folder: Path) -> Iterator[Decoder]:
    """A block server over real memory, without its threads. What arrives on the local socket and
    from other nodes is answered or dropped, and changes no word.
    """
    del folder
    spec = memory_spec()
    forget(spec)  # of a process that was cut short
    memory = NodeMemory.create(spec)
    server: Any = object.__new__(BlockServer)
    remote, local = Router(), Router()
    server.__dict__.update(
        _run_id=RUN_ID,
        _server="memoryd",
        _memory=memory,
        _metrics=MemoryMetrics(CollectorRegistry()),
        _held=[],
        _leases={},
        _offer=None,
        _limiter=None,
        _remote=remote,
        _local=local,
        _remote_chunk_bytes=1 << 20,
    )
    for block in (0, 1):
        memory.control.set_slot_version(block, 0, 4)
    memory.control.set_committed(4)
    memory.control.set_incarnation(1)
    words = bytes(memory.control._buffer)

    def receive(data: bytes) -> None:
        for socket in (remote, local):
            socket.waiting.append([b"client", *in_pieces(data)])
            server._receive(socket)
            server._retry_held()
            server._prune_leases()
            socket.sent.clear()
        assert bytes(memory.control._buffer) == words

    try:
        yield receive
    finally:
        memory.close()
        forget(spec)


@contextmanager
def _optimizerd(folder: Path) -> Iterator[Decoder]:
    del folder
    inbox = Inbox()
    stub: Any = SimpleNamespace(_inbox=inbox, _metrics=OptimizerMetrics(CollectorRegistry()))

    def take(data: bytes) -> None:
        GradientSocket._take(stub, in_pieces(data))
        while not inbox.empty():
            assert isinstance(inbox.get(), GradientReady | BlockUpdated)

    yield take


class Dealer:
    """A client's socket: the frames of one answer."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames

    def recv(self) -> bytes:
        """The next frame."""
        return self._frames.pop(0) if self._frames else b""

    def get(self, option: int) -> int:
        """Whether there are more."""
        return int(bool(self._frames))

    def recv_into(self, out: memoryview) -> int:
        """The next frame, into memory; as pyzmq, its whole size is returned."""
        frame = self._frames.pop(0)
        out[: len(frame)] = frame[: len(out)]
        return len(frame)


def _answer(data: bytes) -> None:
    """An answer to a client of memoryd that waits for 32 bytes of an array."""
    memory = bytearray(32)
    fetch = _Fetch(block_request(), memoryview(memory))
    asked = SimpleNamespace(send=lambda *words: None)
    fetch.ask(asked)  # type: ignore[arg-type]
    fetch.take(Dealer(in_pieces(data)))  # type: ignore[arg-type]


def _answers() -> list[bytes]:
    def reply(**changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "status": "ok",
            "block": 1,
            "version": 4,
            "offset": 0,
            "num_bytes": 32,
            "array_bytes": 32,
            "error": "",
        }
        return encode(BlockReply(**(fields | changes)))

    return [
        joined(reply(), bytes(32)),
        joined(reply(), bytes(16), bytes(16)),
        joined(reply(status="wait")),
        joined(reply(status="error", error="there is none")),
    ]


def _read_request(data: bytes) -> None:
    """A request to fetchd by a process of its node."""
    socket = SimpleNamespace(recv=lambda size, flags: data)
    client: Any = object.__new__(Client)
    client.__dict__.update(socket=socket, busy={1}, gone=False)
    request = client.receive()
    assert request.slot not in client.busy


def _offered(data: bytes) -> None:
    """What another node's memoryd says of its fetchd, and a range of it."""
    reply = decode(data, AgentReply)
    for found in reply.offers:
        Places(found, memory_spec()).data(block_request())


def _real_offer() -> bytes:
    spec = memory_spec()
    sizes = [(kind.value, 1 << 20, 1 << 30) for kind in SegmentKind]
    fields = {name: getattr(offer(), name) for name in AgentOffer.__slots__}
    found = AgentOffer(**(fields | {"segments": tuple(sizes), "digest": spec.digest}))
    return encode(AgentReply(offers=(found,), error=""))


def _words(data: bytes) -> None:
    size = _HEADER.size + _BLOCK.size
    data = data.ljust(size, b"\0")[:size]
    CopiedWords.unpack(data[: _HEADER.size], data[_HEADER.size :])


def _state_words(data: bytes) -> None:
    data = data.ljust(STATE_WORDS_BYTES, b"\0")[:STATE_WORDS_BYTES]
    assert StateWords.unpack(data).pack() == data


def _page(data: bytes) -> None:
    """What a process of the node says when metricsd asks for its page, put on the node's page."""
    call = _Request(connection=None, pid=1, read=bytearray(data))  # type: ignore[arg-type]
    page = call.page()
    if page is not None:
        merged = MergedExposition()
        merged.add(page, {"process": "memoryd"})
        merged.add(page, {"process": "optimizerd"})
        merged.text()


def _pages() -> list[bytes]:
    page = (
        b'# HELP a_total counts.\n# TYPE a_total counter\na_total{b="c"} 1.0\na_total 2e5\n'
        b'# HELP g is.\n# TYPE g gauge\ng{le="+Inf"} NaN\n'
    )
    return [len(page).to_bytes(LENGTH_BYTES, "big") + page, bytes(LENGTH_BYTES)]


def _deep() -> list[bytes]:
    return [msgpack.packb(["LeaseRequest", {"run_id": "r"}]), b"\x91" * 1500 + b"\xc0"]


WIRE = (
    Target(
        name="frames",
        open=plainly(_header),
        covers=("protocol.wire.frames.decode",),
        seeds=lambda: [*(encode(header) for header in HEADERS), *_deep()],
        form=Form.MSGPACK,
        examples=400,
    ),
    Target(
        name="worker-inbox",
        open=_worker_inbox,
        covers=(
            "workers.channels.transport.Transport._accept",
            "workers.channels.tensors.from_frames",
        ),
        seeds=_tensor_frames,
        examples=200,
        form=Form.FRAMES,
    ),
    Target(
        name="packed-tensors",
        open=plainly(_packed),
        covers=("workers.channels.tensors.Packing.unpack",),
        seeds=lambda: [joined(*headers(TransferShape), bytes(300))],
        form=Form.FRAMES,
    ),
    Target(
        name="memoryd",
        open=_memoryd,
        covers=("daemons.memory.server.BlockServer._receive",),
        seeds=lambda: [
            joined(data) for data in headers(LeaseRequest, BlockRequest, AgentOffer, AgentRequest)
        ],
        examples=200,
        form=Form.FRAMES,
    ),
    Target(
        name="optimizerd",
        open=_optimizerd,
        covers=("daemons.optimizer.inbox.GradientSocket._take",),
        seeds=lambda: [joined(data) for data in headers(GradientReady, BlockUpdated)],
        examples=200,
        form=Form.FRAMES,
    ),
    Target(
        name="block-answers",
        open=plainly(_answer),
        covers=("protocol.wire.blocks._Fetch.take",),
        seeds=_answers,
        form=Form.FRAMES,
    ),
    Target(
        name="read-requests",
        open=plainly(_read_request),
        covers=("daemons.fetch.clients.Client.receive",),
        seeds=lambda: headers(ReadRequest),
        form=Form.MSGPACK,
    ),
    Target(
        name="agent-offers",
        open=plainly(_offered),
        covers=("daemons.fetch.reads.Places.__init__", "daemons.fetch.reads.Places.data"),
        seeds=lambda: [_real_offer(), *headers(AgentReply)],
        form=Form.MSGPACK,
    ),
    Target(
        name="copied-words",
        open=plainly(_words),
        covers=("shm.words.CopiedWords.unpack",),
        seeds=lambda: [bytes(_HEADER.size + _BLOCK.size)],
    ),
    Target(
        name="state-words",
        open=plainly(_state_words),
        covers=("protocol.wire.frames.StateWords.unpack",),
        seeds=lambda: [bytes(STATE_WORDS_BYTES)],
        examples=20,
    ),
    Target(
        name="metrics-pages",
        open=plainly(_page),
        covers=(
            "daemons.monitor.metrics.scrape._Request.page",
            "daemons.monitor.metrics.exposition.MergedExposition.add",
        ),
        seeds=_pages,
    ),
)
