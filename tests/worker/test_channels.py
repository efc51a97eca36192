"""Process groups between workers: the same bits as messages, and the same ends of waits."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from socket import create_server
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from penstock.config.platforms import TRANSPORTS, TransportTraits
from penstock.host.errors import ConfigError, LostMemberError, ProtocolError
from penstock.models.torch_internals import TCPStore
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.wire.frames import GroupAddress, TensorHeader, TransferShape
from penstock.workers.channels import opening
from penstock.workers.channels.group import GroupChannel
from penstock.workers.channels.inbox import Notices, TransferKey
from penstock.workers.channels.nccl import NcclWire
from penstock.workers.channels.opening import open_channel, told_by, transport_of
from penstock.workers.channels.order import (
    MAX_TRANSFERS,
    RESERVED_TAG,
    Direction,
    OrderedTransfer,
    Place,
    TransferOrder,
)
from penstock.workers.waiting import Abort, Interrupted
from tests.worker import cluster as cluster_module
from tests.worker.ending import aborting, ended_by


@pytest.fixture(scope="module", autouse=True)
def store_library() -> None:
    """The first store of a process opens a pipe that stays."""
    socket = create_server(("127.0.0.1", 0))
    port = socket.getsockname()[1]
    TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=socket.detach())


PARITY = [
    pytest.param("1f1b", 2, 1, {}, id="1f1b"),
    pytest.param("chimera", 2, 1, {}, id="chimera"),
    pytest.param("spipe", 2, 2, {}, id="spipe-checkpoints-two-nodes"),
    pytest.param("interleaved", 3, 1, {"stages_per_device": 2}, id="interleaved"),
    pytest.param("gpipe", 4, 2, {"replicas": 2, "reduce_gradients": True}, id="reduction"),
]


def no_messages(*arguments: Any) -> None:
    raise AssertionError("tensors were sent as messages")


def trained(cluster: Any) -> list[Any]:
    """Two attempts with two evaluations between them, bit for bit."""
    found = []
    for phase, number in (("train", 1), ("eval", 1 << 20), ("eval", (1 << 20) + 1), ("train", 2)):
        found.append(cluster.train(cluster.job(attempt=number, phase=phase, seed=number % 97)))
        found.append(cluster.gradient_bytes())
    return found


@pytest.mark.parametrize(("scheme", "workers", "nodes", "schedule"), PARITY)
def test_gloo_gives_the_bits_of_messages(
    make_cluster: Any, scheme: str, workers: int, nodes: int, schedule: Any
) -> None:
    found = []
    for transport in ("zmq", "gloo"):
        cluster = make_cluster(
            scheme=scheme, workers=workers, nodes=nodes, schedule=schedule, transport=transport
        )
        for worker in cluster.workers:
            if transport == "gloo":
                worker.context.transport.send = no_messages
        found.append(trained(cluster))
    assert found[0] == found[1]


class BoxWire:
    """A wire between threads: buffers lie in boxes of their own until they are taken."""

    boxes: ClassVar[dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]]] = {}

    def __init__(self, own: int) -> None:
        self.own = own
        self.posted: dict[TransferKey, tuple[torch.Tensor, tuple[int, int, int]]] = {}

    def outgoing(self, tensors: Any) -> Any:
        return tensors

    incoming = outgoing

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, peer: int, buffer: torch.Tensor, tag: int) -> None:
        self.boxes.setdefault((self.own, peer, tag), queue.SimpleQueue()).put(buffer.clone())

    def receive(self, peer: int, buffer: torch.Tensor, tag: int, key: TransferKey) -> None:
        self.posted[key] = buffer, (peer, self.own, tag)

    def wait(self, key: TransferKey, abort: Abort, timeout_s: float) -> None:
        buffer, box = self.posted.pop(key)
        buffer.copy_(self.boxes.setdefault(box, queue.SimpleQueue()).get(timeout=timeout_s))

    def arrival_s(self, key: TransferKey) -> float | None:
        return None

    def check(self) -> None:
        pass

    close = check


def test_a_new_transport_is_a_row_and_a_module(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(make_cluster(workers=2, transport="zmq"))
    module = ModuleType("boxes")
    vars(module).update(is_built=lambda: True, join=lambda meeting, *_: BoxWire(meeting.own))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = TransportTraits(group_module=module.__name__)
    monkeypatch.setattr(opening, "TRANSPORTS", {**TRANSPORTS, "boxes": row})
    monkeypatch.setattr(cluster_module, "transport_here", lambda config: "boxes")
    cluster = make_cluster(workers=2)
    cluster.begin(2)
    for worker in cluster.workers:
        worker.context.transport.send = no_messages
    assert trained(cluster) == wanted
    assert BoxWire.boxes


def test_one_worker_needs_no_group(make_cluster: Any) -> None:
    cluster = make_cluster(workers=1, transport="gloo")
    assert not isinstance(cluster.workers[0].context.channel, GroupChannel)


def test_transfers_of_an_aborted_attempt_die_with_their_epoch(make_cluster: Any) -> None:
    """The abort comes from inside, after a different number of sends each time."""
    cluster = make_cluster(scheme="spipe", workers=2, micro_batches=8, transport="gloo")
    wanted = cluster.train(cluster.job(attempt=1)), cluster.gradient_bytes()
    for epoch, sends in ((2, 1), (3, 5)):
        cluster.begin(epoch)
        with aborting(cluster, cluster.workers[0].context.channel, sends):
            results = cluster.run(cluster.job(attempt=1))
        assert [type(result) for result in results] == [Interrupted, Interrupted]
    cluster.begin(9)
    assert (cluster.train(cluster.job(attempt=1)), cluster.gradient_bytes()) == wanted


class Pair:
    """The channels of a cluster of two; device 0 sends activations of stage 0."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.sender, self.receiver = (worker.context.channel for worker in cluster.workers)
        self.abort = Abort()

    def key(self, micro_batch: int, attempt: int = 1) -> TransferKey:
        return TransferKey(
            phase="train", attempt=attempt, kind="activation", stage=0, micro_batch=micro_batch
        )

    def send(self, micro_batch: int, **tensors: torch.Tensor) -> None:
        self.sender.send(1, self.key(micro_batch), tensors, self.abort, 5.0)

    def take(self, micro_batch: int, timeout_s: float = 5.0) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.receiver.take(
            self.key(micro_batch), self.abort, timeout_s
        )
        return found


@pytest.fixture
def pair(make_cluster: Any) -> Iterator[Pair]:
    yield Pair(make_cluster(workers=2, transport="gloo"))


def test_tensors_arrive_equal_in_any_order_of_takes(pair: Pair) -> None:
    sent = [
        {
            "hidden": torch.randn(2, 30, 4)[:, ::2],
            "scalar": torch.tensor(float(m)),
            "empty": torch.empty(0, 4),
            "mask": torch.tensor([True, False, m > 1]),
            "half": torch.randn(9).to(torch.bfloat16),
        }
        for m in range(4)
    ]
    pair.receiver.post(pair.key(0))  # shapes are not known yet
    for m, tensors in enumerate(sent):
        pair.send(m, **tensors)
    for m in (2, 0, 3, 1):
        found = pair.take(m)
        assert list(found) == list(sent[m])
        for name, tensor in sent[m].items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            assert found[name].data_ptr() % 64 == 0 or tensor.numel() == 0
        assert pair.receiver.arrival_s(pair.key(m)) <= time.perf_counter()
    assert pair.receiver.leftovers("train", 1) == ()


def test_what_was_posted_and_not_taken_is_left_over(pair: Pair) -> None:
    for m in range(2):
        pair.send(m, hidden=torch.ones(2))
    pair.take(1)
    assert pair.receiver.leftovers("train", 1) == (pair.key(0),)


def test_shapes_that_vary_are_refused_at_the_sender(pair: Pair) -> None:
    pair.send(0, hidden=torch.ones(2, 3))
    with pytest.raises(
        ProtocolError,
        match=r"micro-batch 1 \(train 1\) holds hidden fp32 \[2, 4\], others of this stage before"
        r" it hidden fp32 \[2, 3\]: where shapes vary, set cluster.transport: zmq",
    ):
        pair.send(1, hidden=torch.ones(2, 4))


def test_waits_end_at_the_deadline_or_the_abort(pair: Pair) -> None:
    """For the shapes of the first transfer, then for bytes, then after the peer broke off."""
    error = ended_by(lambda: pair.take(0, 0.1))
    assert isinstance(error, LostMemberError)
    assert str(error) == (
        "waited 0.1 s for activation of stage 0, micro-batch 0 (train 1) from worker 0"
    )
    pair.send(0, hidden=torch.ones(2))
    pair.take(0, 600.0)  # the shapes are there
    error = ended_by(lambda: pair.take(1, 0.1))
    assert isinstance(error, LostMemberError)
    assert str(error) == "waited 0.1 s for activation of stage 0, micro-batch 1 (train 1)"
    pair.sender.close()
    pair.send(1, hidden=torch.ones(2))  # to nobody, like a message to a process that is gone
    error = ended_by(lambda: pair.take(1, 0.2))
    assert isinstance(error, LostMemberError)
    assert "micro-batch 1 (train 1) (a connection broke: " in str(error)
    threading.Timer(0.1, pair.abort.set, ["drained"]).start()
    error = ended_by(lambda: pair.take(1, 60.0))
    assert isinstance(error, Interrupted)


def test_a_member_that_does_not_come_is_named(make_cluster: Any) -> None:
    cluster = make_cluster(workers=2, transport="zmq")
    config = cluster.config.model_copy(
        update={"cluster": cluster.config.cluster.model_copy(update={"transport": "gloo"})}
    )

    def alone(device: int, abort: Abort, timeout_s: float) -> Exception:
        context = cluster.workers[device].context
        return ended_by(
            lambda: open_channel(
                config=config,
                plan=cluster.plan,
                run_id=context.run_id,
                epoch=context.epoch,
                device_index=device,
                device=context.device,
                transport=context.transport,
                name="gloo",
                abort=abort,
                timeout_s=timeout_s,
            )
        )

    for device, missing in ((0, 1), (1, 0)):
        cluster.begin(2 + device)
        abort = Abort()
        error = alone(device, abort, 0.3)
        assert isinstance(error, LostMemberError)
        assert (
            f"s for worker.{missing} to join the process group of membership {2 + device}"
            in str(error)
        )
        abort.set("drained")
    abort = Abort()
    threading.Timer(0.1, abort.set, ["drained"]).start()
    error = alone(0, abort, 60.0)
    assert isinstance(error, Interrupted)


def test_the_order_is_that_of_the_senders_programs(make_cluster: Any) -> None:
    cluster = make_cluster(scheme="1f1b", workers=2, micro_batches=2)
    plan = cluster.plan
    order = TransferOrder.of(plan)
    assert dict(order.transfers) == {
        Direction(0, 1, "train"): (
            OrderedTransfer("activation", 0, 0),
            OrderedTransfer("activation", 0, 1),
        ),
        Direction(1, 0, "train"): (
            OrderedTransfer("gradient", 1, 0),
            OrderedTransfer("gradient", 1, 1),
        ),
        Direction(0, 1, "eval"): (
            OrderedTransfer("activation", 0, 0),
            OrderedTransfer("activation", 0, 1),
        ),
    }
    assert order.members == (0, 1)
    assert order.arriving(0) == {
        ("train", OrderedTransfer("gradient", 1, m)): Place(Direction(1, 0, "train"), m)
        for m in range(2)
    }
    deaf = tuple(i for i in plan.programs[1] if str(i) != "RA 0 1 peer=0")
    with pytest.raises(
        ConfigError,
        match=r"plan \(train\): device 1 does not receive what device 0 sends to it:"
        r" activation 0 1",
    ):
        TransferOrder.of(replace(plan, programs=(plan.programs[0], deaf)))
    extra = (*plan.programs[1], *parse_program("device 0:\n  RA 0 7 peer=0")[0])
    with pytest.raises(ConfigError, match="activation 0 7"):
        TransferOrder.of(replace(plan, programs=(plan.programs[0], extra)))


def test_tags_tell_transfers_under_way_apart() -> None:
    tags = {
        Place(Direction(0, 1, phase), position).tag(number)
        for phase in ("train", "eval")
        for number in (1, 2, 1 << 20, 16383)
        for position in (0, 1, MAX_TRANSFERS - 1)
    }
    assert len(tags) == 24
    assert 0 <= min(tags) and max(tags) < RESERVED_TAG


def test_notices_are_kept_for_their_epoch_only() -> None:
    notices = Notices()
    notices.open(run_id="r", epoch=3)
    shape = TransferShape(
        run_id="r",
        epoch=3,
        sender=0,
        phase="train",
        kind="activation",
        stage=0,
        tensors=(TensorHeader(name="h", dtype="fp32", shape=(2,)),),
    )
    address = GroupAddress(run_id="r", epoch=3, port=70000)
    assert notices.put(replace(shape, epoch=2)) == "stale"
    assert notices.put(replace(address, epoch=2)) is None
    assert notices.put(shape) is None
    assert notices.put(shape) == "doubled"
    for wrong in (
        address,
        replace(shape, stage=1, tensors=(TensorHeader(name="h", dtype="object", shape=()),)),
        replace(shape, stage=1, tensors=shape.tensors * 2),
        replace(shape, stage=1, tensors=(replace(shape.tensors[0], shape=(1 << 62,)),)),
    ):
        with pytest.raises(ProtocolError):
            notices.put(wrong)
    key = (0, "train", "activation", 0)
    assert notices.wait_packing(key, "", Abort(), 1.0).num_bytes == 8
    with pytest.raises(LostMemberError, match="waited 0 s for the leader"):
        notices.wait_port("the leader", Abort(), 0.0)
    notices.open(run_id="r", epoch=4)
    assert notices.packing(key) is None


@pytest.mark.parametrize(
    ("cluster", "gpus", "built", "name"),
    [
        ({}, 0, False, "zmq"),
        ({"transport": "gloo"}, 0, False, "gloo"),
        ({"device": "cuda"}, 2, True, "nccl"),
        ({"device": "cuda"}, 1, True, "zmq"),
        ({"device": "cuda"}, 2, False, "zmq"),
        ({"device": "cuda", "transport": "gloo"}, 2, True, "gloo"),
        ({"device": "emulated:v100-figure9"}, 2, True, "zmq"),
        ({"device": "cuda", "security": "tls"}, 2, True, "zmq"),
        ({"device": "cuda", "security": "tls-trusted-fabric"}, 2, True, "nccl"),
        ({"transport": "gloo", "security": "tls-trusted-fabric"}, 0, False, "gloo"),
    ],
)
def test_what_auto_comes_to(
    config_of: Any, cluster: Any, gpus: int, built: bool, name: str
) -> None:
    config = config_of({"workers": 2, **cluster})
    assert transport_of(config, gpus, lambda asked: built or asked != "nccl") == name


def test_nonsense_is_refused(config_of: Any) -> None:
    for cluster, complaint in (
        ({"transport": "nccl"}, "nccl is for cluster.device: cuda, which is 'cpu'"),
        ({"transport": "nccl", "device": "emulated:x"}, "emulated:x'; auto and zmq work there"),
        ({"transport": "gloo", "device": "emulated:x"}, "gloo is for cluster.device: cpu, cuda"),
        (
            {"transport": "gloo", "security": "tls"},
            r"gloo is unencrypted, .*; with cluster.security: tls use zmq, .*tls-trusted-fabric",
        ),
        (
            {"transport": "smoke"},
            "cluster.transport = 'smoke': accepted is auto, zmq, gloo or nccl",
        ),
    ):
        with pytest.raises(ConfigError, match=complaint):
            config_of(cluster)
    config = config_of({"device": "cuda", "transport": "nccl", "workers": 2})
    for gpus, built, complaint in ((1, True, "there are 1"), (2, False, "built without NCCL")):
        with pytest.raises(ConfigError, match=complaint):
            transport_of(config, gpus, lambda name, built=built: built)


def test_only_the_leader_tells_where_the_group_meets() -> None:
    assert [told_by(device, (1, 2, 4)) for device in (0, 1, 2)] == [set(), {2, 4}, set()]


class FakeWork:
    """A transfer of NCCL."""

    def __init__(self) -> None:
        self.done = False
        self.awaited = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.awaited = True


class FakeGroup:
    """Of three ranks; this is rank 1."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self.works: list[FakeWork] = []
        self.aborted = threading.Event()

    def rank(self) -> int:
        return 1

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        self._log.append(f"{self._name} send {rank}")
        return self._start()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        self._log.append(f"{self._name} recv {rank}")
        return self._start()

    def abort(self) -> None:
        self.aborted.set()

    def _start(self) -> FakeWork:
        self.works.append(FakeWork())
        return self.works[-1]


class FakeNccl:
    """A wire of device 4 between devices 2 and 7."""

    def __init__(self, timeout_s: float) -> None:
        self.log: list[str] = []
        self.groups = [FakeGroup(name, self.log) for name in ("up", "down")]
        self.abort = Abort()
        pair: Any = tuple(self.groups)
        self.wire = NcclWire(pair, (2, 4, 7), torch.device("cpu"), self.abort, timeout_s)

    def receive(self, peer: int) -> TransferKey:
        key = TransferKey(phase="train", attempt=1, kind="gradient", stage=peer, micro_batch=0)
        self.wire.receive(peer, self.wire.buffer(8), 0, key)
        return key


def test_nccl_has_a_group_for_each_direction_and_waits_on_the_stream() -> None:
    nccl = FakeNccl(5.0)
    for peer in (2, 7):
        nccl.wire.send(peer, torch.empty(8), 0)
    keys = [nccl.receive(peer) for peer in (2, 7)]
    assert nccl.log == ["down send 0", "up send 2", "up recv 0", "down recv 2"]
    for key in keys:
        nccl.wire.wait(key, nccl.abort, 5.0)
    received = [nccl.groups[0].works[1], nccl.groups[1].works[1]]
    assert all(work.awaited and not work.done for work in received), "the host did not wait"
    nccl.wire.check()
    nccl.wire.close()
    assert all(group.aborted.is_set() for group in nccl.groups)


@pytest.mark.parametrize("cause", ["abort", "deadline"])
def test_nccl_transfers_that_hang_are_broken_off(cause: str) -> None:
    """By a thread: the host may be in a synchronisation. Completed ones are not late."""
    nccl = FakeNccl(0.3 if cause == "deadline" else 60.0)
    keys = [nccl.receive(peer) for peer in (2, 7)]
    for key in keys:
        nccl.wire.wait(key, nccl.abort, 5.0)
    nccl.groups[0].works[0].done = True
    if cause == "abort":
        nccl.abort.set("drained")
    assert all(group.aborted.wait(600.0) for group in nccl.groups)
    if cause == "deadline":
        with pytest.raises(LostMemberError, match=r"waited 0\.3 s for gradient of stage 7"):
            nccl.wire.check()
    else:
        nccl.wire.check()
    nccl.wire.close()
