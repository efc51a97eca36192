"""An optimizerd as a process, and what surrounds it: real memory, real sockets, a real stream.

The rig plays the scheduler (a small gRPC server), the workers and memoryd (its real block server).
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import zmq
from prometheus_client import CollectorRegistry

from penstock import _native
from penstock.config.schema import Config, parse_config
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.host.stopping import stop_signals_blocked
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.run.names import ipc_address, optimizerd_name
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.frames import GradientReady, encode
from penstock.protocol.wire.sockets import socket_access
from penstock.shm.control import Decision
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable, DType

WAIT_S = 600.0
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
            access=socket_access(self.config, self.run.path, name),
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
        self.spawn(node)
        node.stream = self.scheduler.joined.get(timeout=WAIT_S)
        assert node.stream.hello.member == optimizerd_name(node.name)
        assert node.process is not None and node.stream.hello.pid == node.process.pid

    def spawn(self, node: Node) -> None:
        """Start the node's optimizerd."""
        address = f"127.0.0.1:{self.scheduler.port}"
        arguments = [str(self.run.path), node.name, address, str(os.getpid())]
        with stop_signals_blocked():  # as a node starts its children
            node.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])

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
                "groups": [group.model_dump() for group in hyper.groups],
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


def small_table(tools: Any) -> BlockTable:
    """Three blocks, one of them frozen."""
    blocks = [tools.make_block(0, [4096, 50]), tools.make_block(1, []), tools.make_block(2, [96])]
    table: BlockTable = tools.make_table(blocks, DType.FP32, DType.FP32)
    return table
