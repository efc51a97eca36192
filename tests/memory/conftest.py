"""A small model, its run directory and memory, a memoryd process, and a scheduler to talk to it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.config.schema import parse_config
from penstock.host.files import write_atomically
from penstock.host.stopping import stop_signals_blocked
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.segment import unlink
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec, padded

WAIT_S = 600.0
NODES = ("a", "b")

RunFactory = Callable[..., RunDirectory]

MEMORYD = """
import sys
from pathlib import Path
import numpy as np
from penstock.daemons.memory.main import main
from penstock.protocol.run.names import node_index
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.memory import NodeMemory

run_dir, node, scheduler, parent = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

def load_initial(cancelled):
    files = RunDirectory(run_dir)
    memory = NodeMemory.attach(files.memory_spec(node_index(files.config, node)))
    for block in memory.owned_blocks():
        master = memory.state(block, "master")
        master[:] = np.arange(master.size, dtype=np.float32) / 7 + block
        memory.frozen(block)[:] = block + 1
    memory.close()

sys.exit(main(run_dir, node, scheduler, parent, load_initial))
"""


def make_block(index: int, elements: int) -> BlockSpec:
    """A matrix, a vector whose end needs padding, and a frozen tensor."""
    second = padded(elements)
    return BlockSpec(
        index=index,
        name=f"block{index}",
        kind="layer",
        layer_index=index,
        tensors=(
            TensorSpec(
                name=f"b{index}.w", shape=(elements // 2, 2), trainable=True, decay=True, offset=0
            ),
            TensorSpec(name=f"b{index}.v", shape=(5,), trainable=True, decay=False, offset=second),
            TensorSpec(name=f"b{index}.f", shape=(3,), trainable=False, decay=False, offset=0),
        ),
        borrows=(),
        trainable_elements=second + 16,
        frozen_elements=16,
        contributions=1,
        forward_flops=1.0,
        activation_bytes=1.0,
        output_bytes=1.0,
    )


def make_table(dtype: DType, elements: int) -> BlockTable:
    blocks = tuple(make_block(index, elements) for index in range(3))
    return BlockTable(
        blocks=blocks,
        weight_dtype=dtype,
        grad_dtype=DType.FP32,
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=256,
        num_parameters=sum(t.num_elements for b in blocks for t in b.tensors),
    )


def make_plan(nodes: int) -> Plan:
    """One device a node; on two nodes blocks 0 and 1 belong to the second, block 2 to the first."""
    stages = (
        (StageRange(start=0, stop=2, device=1), StageRange(start=2, stop=3, device=0))
        if nodes == 2
        else (StageRange(start=0, stop=3, device=0),)
    )
    return Plan(
        scheme="gpipe",
        num_devices=nodes,
        num_microbatches=1,
        forward_stages=stages,
        backward_stages=stages,
        programs=((),) * nodes,
        evaluation=((),) * nodes,
    )


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[RunFactory]:
    """Prepared run directories; their segments are removed afterwards."""
    made: list[RunDirectory] = []

    def make(
        *,
        nodes: int = 1,
        dtype: DType = DType.BF16,
        elements: int = 90,
        optimizer: dict[str, Any] | None = None,
    ) -> RunDirectory:
        directory = RunDirectory.create(tmp_path / f"run{len(made)}")
        config = parse_config(
            {
                "model": {"hf": {"model_type": "llama"}, "dtype": dtype.value},
                "data": {"path": "@stdlib"},
                "optimizer": optimizer or {},
                "cluster": {
                    "workers": 1,
                    "nodes": [{"name": name} for name in NODES[:nodes]],
                    "heartbeat_interval_s": 0.1,
                    "heartbeat_timeout_s": 5.0,
                },
            }
        )
        write_atomically(directory.path / "resolved.yaml", config.to_yaml())
        write_atomically(directory.path / "table.json", make_table(dtype, elements).to_json())
        write_atomically(directory.path / "plan.json", make_plan(nodes).to_json())
        made.append(directory)
        return directory

    yield make
    for directory in made:
        for index in range(len(directory.config.cluster.nodes)):
            spec = directory.memory_spec(index)
            for kind in SegmentKind:
                unlink(spec.name(kind))


@pytest.fixture
def spec(make_run: RunFactory) -> MemorySpec:
    """Identity of the memory of a one-node run."""
    return make_run().memory_spec(0)


@pytest.fixture
def memory(spec: MemorySpec) -> Iterator[NodeMemory]:
    """Fresh memory of that node: incarnation 0."""
    found = NodeMemory.create(spec)
    yield found
    found.close()


def fill_randomly(memory: NodeMemory, seed: int = 0) -> None:
    """Random master, state and frozen weights with zero padding."""
    random = np.random.default_rng(seed)
    table = memory.spec.table
    for block in memory.owned_blocks():
        for tensor in table.blocks[block].tensors:
            place = slice(tensor.offset, tensor.offset + tensor.num_elements)
            if tensor.trainable:
                for name in ("master", *table.state_arrays):
                    memory.state(block, name)[place] = random.normal(size=tensor.num_elements)
            else:
                memory.frozen(block)[place] = random.integers(0, 2**16, tensor.num_elements)


def commit_everything(memory: NodeMemory, version: int, incarnation: int = 1) -> None:
    """Say that everything in memory is version ``version``."""
    for block in memory.owned_blocks():
        memory.control.set_state_version(block, version)
        memory.control.set_slot_version(block, version % 2, version)
    memory.control.set_committed(version)
    memory.control.set_incarnation(incarnation)


def write_manifest(memory: NodeMemory, directory: Path, version: int, files: Any) -> None:
    """What the scheduler writes when all memoryds have saved."""
    state, base = (
        {f.name: {"bytes": f.num_bytes, "sha256": f.sha256} for f in files if f.base is kind}
        for kind in (False, True)
    )
    manifest = {
        "format": 2,
        "run_id": memory.spec.run_id,
        "version": version,
        "table_digest": memory.spec.table.digest,
        "files": state,
        "base": base,
        "scheduler": {},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


class FakeScheduler(rpc.MembershipServicer):
    """Accepts members; tests send orders and wait for answers."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._received: dict[str, list[Any]] = {}
        self._outgoing: dict[str, queue.SimpleQueue[pb.SchedulerMessage | None]] = {}
        self.heartbeats = 0
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        add = rpc.add_MembershipServicer_to_server
        add(self, self._server)  # type: ignore[no-untyped-call]  # written by protoc
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Join(self, requests: Any, context: Any) -> Iterator[pb.SchedulerMessage]:
        """One member's stream."""
        hello = next(requests).hello
        outgoing: queue.SimpleQueue[pb.SchedulerMessage | None] = queue.SimpleQueue()
        outgoing.put(pb.SchedulerMessage(heartbeat=pb.Heartbeat()))
        reader = threading.Thread(target=self._read, args=(hello, requests, outgoing))
        with self._condition:
            self._outgoing[hello.member] = outgoing
            self._note(hello.member, hello)
        reader.start()
        while (message := outgoing.get()) is not None:
            yield message
        reader.join(timeout=WAIT_S)

    def _read(self, hello: Any, requests: Any, outgoing: Any) -> None:
        try:
            for message in requests:
                kind = message.WhichOneof("body")
                with self._condition:
                    if kind == "heartbeat":
                        self.heartbeats += 1
                        outgoing.put(pb.SchedulerMessage(heartbeat=pb.Heartbeat()))
                    else:
                        self._note(hello.member, getattr(message, kind))
        except grpc.RpcError:
            pass  # the member was killed
        outgoing.put(None)

    def _note(self, member: str, message: Any) -> None:
        self._received.setdefault(member, []).append(message)
        self._condition.notify_all()

    def send(self, member: str, **body: Any) -> None:
        """Order something."""
        self._outgoing[member].put(pb.SchedulerMessage(**body))

    def wait_for(self, member: str, kind: type[Any]) -> Any:
        """The next message of this kind from the member; others are dropped."""
        deadline = time.monotonic() + WAIT_S
        with self._condition:
            while True:
                waiting = self._received.setdefault(member, [])
                while waiting:
                    message = waiting.pop(0)
                    if isinstance(message, kind):
                        return message
                if not self._condition.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no {kind.__name__} from {member} in {WAIT_S} s")

    def close(self) -> None:
        """End all streams."""
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        self._server.stop(grace=1.0).wait(timeout=WAIT_S)
        self._pool.shutdown()


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    """A scheduler that does nothing by itself."""
    found = FakeScheduler()
    yield found
    found.close()


StartMemoryd = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_memoryd(scheduler: FakeScheduler) -> Iterator[StartMemoryd]:
    """Starts memoryds with a simple pattern as initial weights; kills them afterwards."""
    with ExitStack() as stack:

        def start(run: RunDirectory, node: str = "a") -> subprocess.Popen[bytes]:
            words = [str(run.path), node, scheduler.address, str(os.getpid())]
            with stop_signals_blocked():  # as a node starts its children
                process = subprocess.Popen(
                    [sys.executable, "-c", MEMORYD, *words], stderr=subprocess.PIPE
                )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def helpers() -> Any:
    """The functions above, for tests (which cannot import this file)."""

    class Helpers:
        fill = staticmethod(fill_randomly)
        commit = staticmethod(commit_everything)
        manifest = staticmethod(write_manifest)

    return Helpers
