"""optimizerd as a process: real memory, real sockets, a real stream, SIGKILL at random instants.

The test plays the scheduler (a small gRPC server), the workers and memoryd (its real block server).
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from penstock import _native
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.protocol.config import Config, parse_config
from penstock.protocol.frames import BlockUpdated, GradientReady, OptimizerStatus, decode, encode
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.instructions import Update
from penstock.protocol.names import ipc_address, optimizerd_name
from penstock.protocol.placement import place
from penstock.protocol.plan import Plan, StageRange
from penstock.protocol.rundir import RunDirectory
from penstock.protocol.step import BlockArrays, OptimizerStep
from penstock.shm.control import Decision
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable, DType
from penstock.shm.topology import Topology, format_cpus

WAIT_S = 20.0
LEARNING_RATE = 0.01
PROGRAM = (
    "import sys, pathlib; from penstock.daemons.optimizer.main import main;"
    " sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))"
)


@dataclass
class Stream:
    """One member's stream, seen from the scheduler."""

    hello: pb.Hello
    outgoing: queue.SimpleQueue[pb.SchedulerMessage | None] = field(
        default_factory=queue.SimpleQueue
    )
    incoming: queue.SimpleQueue[pb.MemberMessage | None] = field(default_factory=queue.SimpleQueue)

    def send(self, **body: Any) -> None:
        self.outgoing.put(pb.SchedulerMessage(**body))

    def expect(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                message = self.incoming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kind} from {self.hello.member} in {WAIT_S} s") from None
            assert message is not None, f"{self.hello.member} is gone, awaited {kind}"
            found = message.WhichOneof("body")
            if found != "heartbeat":
                assert found == kind, f"awaited {kind}, got {message}"
                return getattr(message, kind)


class Scheduler(rpc.MembershipServicer):
    """Accepts members; the test says what it sends."""

    def __init__(self) -> None:
        self.joined: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(16)
        self._server = grpc.server(self._executor)
        rpc.add_MembershipServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Join(self, request_iterator: Any, context: Any) -> Iterator[pb.SchedulerMessage]:
        """One stream."""
        stream = Stream(hello=next(request_iterator).hello)
        context.add_callback(lambda: stream.outgoing.put(None))
        reader = threading.Thread(target=self._read, args=(request_iterator, stream))
        reader.start()
        self.joined.put(stream)
        while (message := stream.outgoing.get()) is not None:
            yield message
        reader.join()

    def _read(self, messages: Any, stream: Stream) -> None:
        try:
            for message in messages:
                stream.incoming.put(message)
        except grpc.RpcError:
            pass  # the process was killed: its stream ends without a farewell
        stream.incoming.put(None)
        stream.outgoing.put(None)

    def close(self) -> None:
        """End all streams."""
        self._server.stop(0).wait()
        self._executor.shutdown()


@dataclass
class Node:
    """One node: memory, block server, optimizerd."""

    name: str
    memory: NodeMemory
    server: BlockServer
    process: subprocess.Popen[bytes] | None = None
    stream: Stream | None = None


class Rig:
    """A run of one or two nodes."""

    def __init__(
        self,
        path: Path,
        table: BlockTable,
        owners: list[int],
        tools: Any,
        *,
        split: bool = False,
        rollback: str = "exact",
    ) -> None:
        self.table = table
        self.tools = tools
        self.run = RunDirectory.create(path)
        self.config = configuration(
            path, num_nodes=max(owners) + 1, tools=tools, split=split, rollback=rollback
        )
        write_inputs(self.run, self.config, table, owners)
        self.scheduler = Scheduler()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.nodes = [self._new_node(i) for i in range(len(self.config.cluster.nodes))]
        self.pool = _native.Pool([0])
        blocks = range(len(table.blocks))
        self.reference = tools.reference(table, self.pool, blocks, half_up=split)
        self.numbers = np.random.default_rng(0)
        self.reference.initialize(self.numbers)
        for node in self.nodes:
            self.reference.fill(node.memory)
        self.epoch, self.attempt, self.version = 0, 0, 0
        self.record = self.make_record(Decision.RESTORE, 1.0)
        self.grads: dict[tuple[int, int], Any] = {}

    def _new_node(self, index: int) -> Node:
        name = self.config.cluster.nodes[index].name
        memory = NodeMemory.create(self.run.memory_spec(index))
        server = BlockServer(
            run_id=self.run.run_id,
            local_address=ipc_address(self.run.run_id, name, "memory"),
            host="127.0.0.1",
        )
        server.start(memory, MemoryMetrics(CollectorRegistry()))
        return Node(name=name, memory=memory, server=server)

    def close(self) -> None:
        """End and remove everything."""
        self.grads.clear()  # views keep the memory mapped
        for node in self.nodes:
            self.kill(node)
            node.server.close()
            node.memory.close()
            node.memory.unlink()
        self.scheduler.close()
        self.context.destroy(linger=0)
        self.pool.close()

    # ---- processes ----

    def start(self, node: Node) -> None:
        """Start the node's optimizerd and wait until it has joined."""
        address = f"127.0.0.1:{self.scheduler.port}"
        arguments = [str(self.run.path), node.name, address, str(os.getpid())]
        node.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])
        node.stream = self.scheduler.joined.get(timeout=WAIT_S)
        assert node.stream.hello.member == optimizerd_name(node.name)
        assert node.stream.hello.pid == node.process.pid

    def kill(self, node: Node) -> None:
        """SIGKILL and reap."""
        if node.process is not None:
            node.process.kill()
            node.process.wait()
            node.process = None

    def begin(self, *, wait: bool = True) -> None:
        """A new epoch for all nodes."""
        self.epoch += 1
        endpoints = [
            pb.Endpoint(member=f"memoryd.{n.name}", address=n.server.endpoint) for n in self.nodes
        ]
        for node in self.nodes:
            self.say(node, drain=pb.Drain(epoch=self.epoch))
            while self.expect(node, None).WhichOneof("body") != "drained":
                pass  # statuses of the old epoch may be on their way
        for node in self.nodes:
            message = pb.Begin(epoch=self.epoch, record=self.record, endpoints=endpoints)
            self.say(node, begin=message)
        for node in self.nodes if wait else ():
            assert self.expect(node, "ready").epoch == self.epoch

    def say(self, node: Node, **body: Any) -> None:
        assert node.stream is not None
        node.stream.send(**body)

    def say_all(self, **body: Any) -> None:
        for node in self.nodes:
            self.say(node, **body)

    def expect(self, node: Node, kind: str | None) -> Any:
        assert node.stream is not None
        if kind is not None:
            return node.stream.expect(kind)
        message = node.stream.incoming.get(timeout=WAIT_S)
        assert message is not None and message.WhichOneof("body") != "failed", message
        return message

    # ---- attempts ----

    def make_record(self, decision: Decision, coefficient: float) -> pb.Record:
        """The record of the present version and attempt."""
        return pb.Record(
            version=self.version,
            attempt=self.attempt,
            decision=decision,
            coefficient=coefficient,
            inverse_loss_scale=0.5,
            learning_rate=LEARNING_RATE,
            bias_step=max(1, self.version),
            incarnation=1,
        )

    def begin_attempt(self, *, hold: bool = False) -> None:
        """Announce an attempt, fill the gradients, say so."""
        self.attempt += 1
        message = pb.RunAttempt(
            epoch=self.epoch,
            attempt=self.attempt,
            base_version=self.version,
            loss_scale=2.0,
            learning_rate=LEARNING_RATE,
            hold=hold,
        )
        self.say_all(run_attempt=message)
        self.grads = {}
        for block in reversed(self.table.blocks):
            for contribution in range(block.contributions if block.trainable_elements else 0):
                self.publish(block.index, contribution)

    def publish(self, block: int, contribution: int) -> None:
        copies = self.nodes[0].memory.spec.layout.gradient_copies[block]
        copy = (self.version + 1) % copies
        [node] = [n for n in self.nodes if n.memory.has((block, "grads", copy, contribution))]
        target = node.memory.grads(block, copy, contribution)
        # A short random vector, repeated: drawing millions of numbers would take all the time.
        period = self.numbers.standard_normal(4099, np.float32)
        target[:] = np.resize(self.tools.to_gradients(period, self.table.grad_dtype), len(target))
        self.grads[(block, contribution)] = target
        node.memory.control.set_ready(block, contribution, epoch=self.epoch, attempt=self.attempt)
        self.push(node, encode(self.message(block, contribution)))

    def message(self, block: int, contribution: int) -> GradientReady:
        return GradientReady(
            run_id=self.run.run_id,
            epoch=self.epoch,
            attempt=self.attempt,
            block=block,
            contribution=contribution,
        )

    def push(self, node: Node, data: bytes) -> None:
        socket = self.context.socket(zmq.PUSH)
        socket.connect(ipc_address(self.run.run_id, node.name, "optimizer"))
        socket.send(data)
        socket.close(linger=2000)

    def statuses(self) -> dict[int, pb.BlockStatus]:
        """Wait for the status of every block."""
        found: dict[int, pb.BlockStatus] = {}
        for node in self.nodes:
            owned = [
                b for b in node.memory.owned_blocks() if self.table.blocks[b].trainable_elements
            ]
            for _ in owned:
                status = self.expect(node, "block_status")
                assert (status.epoch, status.attempt) == (self.epoch, self.attempt)
                found[status.block] = status
            assert set(owned) <= set(found)
        return found

    def journal(self, decision: Decision = Decision.COMMIT, coefficient: float = 1.0) -> None:
        """Decide for the attempt: from here on the commit is the truth."""
        self.version += 1
        self.record = self.make_record(decision, coefficient)
        for block in self.reference.arrays:
            parts = [
                np.array(self.grads[(block, k)])
                for k in range(self.table.blocks[block].contributions)
            ]
            copies = [self.tools.aligned(len(part), part.dtype) for part in parts]
            for copy, part in zip(copies, parts, strict=True):
                copy[:] = part
            self.reference.step(
                block, copies, lr=LEARNING_RATE, step=self.version, coefficient=0.5 * coefficient
            )

    def commit(self) -> None:
        self.say_all(commit=pb.Commit(epoch=self.epoch, record=self.record))

    def amend(self, coefficient: float) -> None:
        self.version += 1
        record = self.make_record(Decision.AMEND, coefficient)
        self.version -= 1
        self.say_all(amend=pb.Amend(epoch=self.epoch, attempt=self.attempt, record=record))
        for node in self.nodes:
            assert self.expect(node, "amended").attempt == self.attempt

    def await_weights(self) -> None:
        """Wait until every block is readable, and compare."""
        for node in self.nodes:
            for block in node.memory.owned_blocks():
                wait_until(
                    lambda n=node, b=block: n.memory.control.readable(b, self.version),  # type: ignore[misc]
                    f"weights of block {block}",
                )
                self.reference.assert_weights(node.memory, block, self.version)

    def settle_and_compare(self) -> None:
        self.await_weights()
        self.say_all(settle=pb.Settle(epoch=self.epoch, version=self.version))
        for node in self.nodes:
            assert self.expect(node, "settled").version == self.version
            for block in node.memory.owned_blocks():
                assert node.memory.control.state_version(block) == self.version
                self.reference.assert_state(node.memory, block)


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.001)


def configuration(path: Path, num_nodes: int, tools: Any, *, split: bool, rollback: str) -> Config:
    hyper = tools.hyperparameters
    return parse_config(
        {
            "run": {"dir": str(path)},
            "model": {"hf": {"model_type": "none"}, "dtype": "bf16" if split else "fp32"},
            "data": {"path": "@stdlib"},
            "optimizer": {
                "betas": list(hyper.betas),
                "eps": hyper.eps,
                "weight_decay": hyper.weight_decay,
                "master": "split" if split else "fp32",
                "rollback": rollback,
            },
            "cluster": {
                "workers": 1,
                "nodes": [{"name": name} for name in "ab"[:num_nodes]],
                "heartbeat_interval_s": 0.5,
                "heartbeat_timeout_s": 30.0,
            },
        }
    )


def write_inputs(run: RunDirectory, config: Config, table: BlockTable, owners: list[int]) -> None:
    """What an optimizerd reads before it joins. ``owners``: the node of each block."""
    (run.path / "resolved.yaml").write_text(config.to_yaml())
    (run.path / "table.json").write_text(table.to_json())
    count = len(owners)
    stages = tuple(StageRange(start=b, stop=b + 1, device=owners[b]) for b in range(count))
    devices = max(owners) + 1
    plan = Plan(
        scheme="none",
        num_devices=devices,
        num_microbatches=1,
        forward_stages=stages,
        backward_stages=stages,
        programs=((),) * devices,
        evaluation=((),) * devices,
    )
    (run.path / "plan.json").write_text(plan.to_json())


RigFactory = Callable[..., Rig]


@pytest.fixture
def new_rig(tmp_path: Path, tools: Any) -> Iterator[RigFactory]:
    rigs: list[Rig] = []

    def create(table: BlockTable, owners: list[int], *, split: bool = False) -> Rig:
        rigs.append(Rig(tmp_path / "run", table, owners, tools, split=split))
        return rigs[-1]

    yield create
    for rig in rigs:
        rig.close()


def small_table(tools: Any) -> BlockTable:
    """Three blocks, one of them frozen."""
    blocks = [tools.make_block(0, [4096, 50]), tools.make_block(1, []), tools.make_block(2, [96])]
    table: BlockTable = tools.make_table(blocks, DType.FP32, DType.FP32)
    return table


def test_a_life_without_accidents(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    assert node.stream is not None and node.process is not None
    hello = node.stream.hello
    assert (hello.run_id, hello.epoch, hello.data_endpoint) == (rig.run.run_id, 0, "")
    rig.begin()
    watcher = rig.context.socket(zmq.SUB)
    watcher.subscribe(b"")
    watcher.connect(ipc_address(rig.run.run_id, "a", "optimizer-status"))
    time.sleep(0.1)  # a subscription takes a moment, and nothing says when it is there
    for decision in ("commit", "skip", "amend", "hold", "commit"):
        rig.begin_attempt(hold=decision == "hold")
        statuses = rig.statuses()
        expected = float(np.square(rig.grads[(0, 0)], dtype=np.float64).sum())
        assert statuses[0].finite and statuses[0].sum_squares == pytest.approx(expected, rel=1e-6)
        if decision == "skip":
            rig.say_all(skip=pb.Skip(epoch=rig.epoch, attempt=rig.attempt))
            continue
        if decision == "amend":
            rig.amend(0.25)
        rig.journal(coefficient=0.25 if decision in ("amend", "hold") else 1.0)
        rig.commit()
        rig.await_weights()
    rig.settle_and_compare()
    assert watcher.poll(2000)
    published = decode(watcher.recv(), OptimizerStatus)
    watcher.close(linger=0)
    assert (published.run_id, published.epoch, published.attempt) == (rig.run.run_id, 1, 1)
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{hello.metrics_port}", timeout=5).read()
    assert b'penstock_optimizer_parameters_total{pass="advance"}' in metrics
    assert b"penstock_optimizer_committed_version 4.0" in metrics
    cores = format_cpus(place(rig.config, 0).optimizer)
    assert f'optimizer="{cores}"'.encode() in metrics
    if len(Topology.read().nodes) == 1:
        assert b"penstock_optimizer_local_state_ratio 1.0" in metrics
    rig.say_all(shutdown=pb.Shutdown(keep_memory=True, reason="done"))
    assert node.process.wait(timeout=WAIT_S) == 0


def test_garbage_strangers_and_lies_on_the_local_socket(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    assert node.stream is not None
    rig.begin()
    for data in (b"", b"\xff" * 100, os.urandom(1000)):
        rig.push(node, data)
    url = f"http://127.0.0.1:{node.stream.hello.metrics_port}"

    def counted(reason: str) -> bool:
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        return f'dropped_messages_total{{reason="{reason}"}}' in text

    rig.attempt = 1
    honest = rig.message(0, 0)
    rig.push(node, encode(honest))  # its ready word says nothing of the kind
    stranger = GradientReady(
        run_id="0" * 12, epoch=honest.epoch, attempt=1, block=0, contribution=0
    )
    rig.push(node, encode(stranger))
    for reason in ("malformed", "not_ready", "other_run"):
        wait_until(lambda r=reason: counted(r), f"messages counted as {reason}")  # type: ignore[misc]
    rig.attempt = 0
    rig.begin_attempt()
    rig.statuses()
    rig.journal()
    rig.commit()
    rig.settle_and_compare()


def test_a_workers_updates_count_and_lies_about_them_do_not(
    new_rig: RigFactory, tools: Any
) -> None:
    """Block 2 is a device's; the test writes its weights, as a worker does."""
    rig = new_rig(small_table(tools), [0, 0, 0])
    file = rig.run.path / "plan.json"
    plan = Plan.from_json(file.read_text())
    file.write_text(replace(plan, programs=((Update(block=2),),)).to_json())
    [node] = rig.nodes
    rig.start(node)
    assert node.stream is not None
    rig.begin()
    control = node.memory.control
    url = f"http://127.0.0.1:{node.stream.hello.metrics_port}"

    def dropped(reason: str) -> bool:
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        return f'dropped_messages_total{{reason="{reason}"}}' in text

    for base in (0, 1):
        rig.begin_attempt()
        step = OptimizerStep.speculative(
            version=base + 1, loss_scale=2.0, learning_rate=LEARNING_RATE
        )
        wait_until(lambda v=base: control.state_version(2) == v, "the settle")  # type: ignore[misc]
        arrays = BlockArrays.of(node.memory, 2, rig.config.optimizer.weight_decay)
        status = arrays.preview(rig.pool, step, rig.config.optimizer)
        truth = BlockUpdated(
            run_id=rig.run.run_id,
            epoch=rig.epoch,
            attempt=rig.attempt,
            block=2,
            version=base + 1,
            finite=True,
            sum_squares=status.sum_squares,
            seconds=0.1,
        )
        for lie in (
            replace(truth, run_id="0" * 12),
            replace(truth, block=0),
            replace(truth, version=base + 2),
            truth,
            truth,
        ):
            rig.push(node, encode(lie))
        assert rig.statuses()[2].sum_squares == status.sum_squares
        rig.journal()
        rig.commit()
        rig.await_weights()
    for reason in ("other_run", "not_on_device", "not_settled", "slot_in_use"):
        wait_until(lambda r=reason: dropped(r), f"messages counted as {reason}")  # type: ignore[misc]
    rig.settle_and_compare()


def test_a_lost_message_is_found_in_the_ready_words(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    rig.begin()
    rig.push = lambda node, data: None  # type: ignore[method-assign]
    rig.begin_attempt()
    assert set(rig.statuses()) == {0, 2}


def test_sigterm_and_refusal_end_the_process(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    rig.start(node)
    rig.begin()
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(timeout=WAIT_S) == 0
    rig.start(node)
    rig.say(node, refused=pb.Refused(reason="an old epoch"))
    assert node.process.wait(timeout=WAIT_S) == 4


def test_memory_of_another_incarnation_is_reported(new_rig: RigFactory, tools: Any) -> None:
    rig = new_rig(small_table(tools), [0, 0, 0])
    [node] = rig.nodes
    node.memory.control.set_incarnation(7)
    rig.start(node)
    rig.say(node, begin=pb.Begin(epoch=1, record=rig.record))
    failed = rig.expect(node, "failed")
    assert "incarnation 7" in failed.error and failed.exit_code == 2
    assert node.process is not None and node.process.wait(timeout=WAIT_S) == 2


def interrupt(rig: Rig, node: Node, fate: random.Random) -> bool:
    """SIGKILL at a random instant; whether it hit in the middle of a pass that writes state."""
    control = node.memory.control
    if fate.random() < 0.75:  # aim at a pass that writes state; on a busy machine it may be missed
        deadline = time.monotonic() + 0.5
        while control.interrupted_pass is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(fate.random() * 0.004)
    else:
        time.sleep(fate.random() * 0.05)
    rig.kill(node)
    hit = _native.undo_state(control.undo_area).armed
    if hit and fate.random() < 0.7:  # once more, while the pass is being finished
        rig.start(node)
        rig.begin(wait=False)
        time.sleep(fate.random() * 0.01)
        rig.kill(node)
    return hit


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_sigkill_amid_a_pass_changes_no_byte(split: bool, new_rig: RigFactory, tools: Any) -> None:
    blocks = [tools.make_block(0, [6_000_000, 64]), tools.make_block(1, [1_500_000])]
    rig = new_rig(tools.make_table(blocks, DType.BF16, DType.BF16), [0, 0], split=split)
    [node] = rig.nodes
    seed = random.randrange(1000)
    fate = random.Random(seed)
    print(f"seed {seed}")
    rig.start(node)
    rig.begin()
    hits = kills = holds = 0
    while (hits < 2 or holds < 1) and kills < 100:
        hold = fate.random() < 0.4
        rig.begin_attempt(hold=hold)
        if node.memory.control.state_version(0) == rig.version:
            rig.statuses()  # nothing was pending: no state is written this time
        else:
            hits += interrupt(rig, node, fate)
            kills += 1
            rig.start(node)
            rig.begin()
            continue
        rig.journal(coefficient=0.25 if hold else 1.0)
        if hold:  # the commit starts holds of all blocks
            rig.commit()
            holds += interrupt(rig, node, fate)
            kills += 1
            rig.start(node)
            rig.begin()
        elif fate.random() < 0.5:
            rig.commit()
        else:  # killed between journal and broadcast
            rig.kill(node)
            rig.start(node)
            rig.begin()
        rig.await_weights()
    told = f"seed {seed}: {kills} kills, {hits} amid an advance or settle, {holds} amid a hold"
    print(f"{told}, version {rig.version}")
    assert hits >= 2 and holds >= 1, told
    rig.settle_and_compare()


def test_a_tied_contribution_of_another_node(new_rig: RigFactory, tools: Any) -> None:
    blocks = [tools.make_block(0, [300_000], contributions=2), tools.make_block(1, [5000])]
    rig = new_rig(tools.make_table(blocks, DType.FP32, DType.FP32), [0, 1])
    owner, other = rig.nodes
    assert not owner.memory.has((0, "grads", 0, 1)) and other.memory.has((0, "grads", 0, 1))
    for node in rig.nodes:
        rig.start(node)
        assert node.stream is not None
        assert node.stream.hello.data_endpoint.startswith("tcp://127.0.0.1:")
    rig.begin()
    for decision in ("commit", "amend", "hold", "kill owner", "kill other", "commit"):
        rig.begin_attempt(hold=decision == "hold")
        rig.statuses()
        if decision == "amend":
            rig.amend(0.5)
        rig.journal(coefficient=0.5 if decision in ("amend", "hold") else 1.0)
        rig.commit()
        rig.await_weights()
        if decision.startswith("kill"):
            # The next attempt's gradients are there, its ready word too, when the pending ones are
            # needed again.
            victim = owner if decision.endswith("owner") else other
            rig.begin_attempt()
            rig.kill(victim)
            rig.start(victim)
            rig.begin()
    rig.settle_and_compare()
