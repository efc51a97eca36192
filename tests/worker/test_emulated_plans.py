"""Plans of every kind on emulated devices in one process: their steps take what is simulated."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from penstock.config.schema import Config, parse_config
from penstock.config.training import OptimizerConfig
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.models.data.batch import MicroBatch
from penstock.planner.cost.emulation import Emulation
from penstock.planner.planning.configured import build_plan
from penstock.planner.simulate import simulate
from penstock.protocol.plan.instructions import Instruction, OffloadGradients, Opcode, Update
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.step import OptimizerStep
from penstock.protocol.run.hardware.bandwidth_log import NodeReads
from penstock.protocol.run.hardware.peer_memory import PeerMemory
from penstock.protocol.run.names import node_of_device, ownership
from penstock.protocol.wire.blocks import BlockClient
from penstock.shm.layout import NodeLayout, Ownership
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.workers.channels.base import MessageChannel
from penstock.workers.channels.inbox import Expected, Inbox
from penstock.workers.channels.transport import Transport
from penstock.workers.epoch import EpochContext, Job
from penstock.workers.interpreter import run_job
from penstock.workers.platforms.emulated.device import EmulatedDevice
from penstock.workers.platforms.emulated.handlers import EMULATED_HANDLERS
from penstock.workers.platforms.emulated.platform import EmulatedPreviewer
from penstock.workers.platforms.emulated.runtime import EmulatedRuntime
from penstock.workers.platforms.meters import NoMeter
from penstock.workers.state.routing import TensorRouting, collective_receives
from penstock.workers.state.updates import BlockUpdates
from penstock.workers.state.weights import RemoteBlocks, WeightLoader
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.trace import TraceRing
from penstock.workers.waiting import Abort

SEQUENCE = 512
CLOCK_S = 0.5
"""What a step takes: long enough that the delays of threads do not matter."""

NONE = {"scheme": "1f1b", "recompute": "none"}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], set[Opcode]]] = {
    # schedule, other sections, instructions that the plan is there for
    "1f1b": (NONE, {}, {Opcode.OFFLOAD_GRADIENTS}),
    "mario": ({**NONE, "passes": ["mario"]}, {}, {Opcode.RECOMPUTE}),
    "selective": ({**NONE, "recompute": "selective", "drop": ["cmb"]}, {}, {Opcode.RECOMPUTE}),
    "zero-bubble": ({"scheme": "zb-h1"}, {}, {Opcode.BACKWARD_WEIGHT}),
    "interleaved": ({**NONE, "scheme": "interleaved"}, {}, {Opcode.SEND_GRADIENT}),
    "chimera": ({**NONE, "scheme": "chimera"}, {}, {Opcode.OFFLOAD_GRADIENTS}),
    "spipe": ({"scheme": "spipe", "backward_stages": 8}, {}, {Opcode.SEND_CHECKPOINT}),
    "spipe on two nodes": (
        {"scheme": "spipe", "backward_stages": 8},
        {
            "cluster": {
                "workers": 2,
                "nodes": [{"name": "a"}, {"name": "b"}],
                "device": "emulated:analytic:V100-32:llama2-7b:layers=12",
            },
            "machine": {"nic_bandwidth": 5e9},
        },
        {Opcode.FETCH_WEIGHTS},
    ),
    "obscura": (
        {**NONE, "passes": ["obscura"]},
        {"memory": {"device_limit": 3.1e9}},
        {Opcode.SWAP_OUT, Opcode.RECOMPUTE},
    ),
    "swaps to peers": ({"scheme": "bpipe"}, {}, {Opcode.SWAP_IN}),
    "updates on devices": (NONE, {}, {Opcode.UPDATE}),
    "sums over replicas": (
        {**NONE, "replicas": 2, "reduce_gradients": True},
        {},
        {Opcode.REDUCE_GRADIENTS},
    ),
    "shared-out weights": (
        {"scheme": "zero3-offload", "stages_per_device": 4},
        {},
        {Opcode.REDUCE_GRADIENTS},
    ),
}


def config_of(name: str, run_dir: Path) -> Config:
    """An optimizer and a memory that cost no time: workers alone are measured here."""
    schedule, sections = PLANS[name][0], dict(PLANS[name][1])
    machine = sections.pop("machine", {})
    cluster = {"workers": 4, "device": "emulated:analytic:V100-32:gpt3-1.3b:half_layers=yes"}
    return parse_config(
        {
            "run": {"dir": str(run_dir)},
            "model": {"dtype": "fp16"},
            "data": {"path": "@stdlib", "sequence_length": SEQUENCE},
            "train": {"global_batch": 8},
            "optimizer": {"grad_dtype": "bf16"},
            "schedule": schedule,
            "emulation": {
                "scale": 1e-5,
                "machine": {"dram_bandwidth": 1e15, "optimizer_rate": 1e15} | machine,
            },
            **sections,
            "cluster": {**cluster, **sections.get("cluster", {})},
        }
    )


@dataclass
class Devices:
    """Emulated devices with their nodes' memories and sockets, a thread each while they run."""

    contexts: list[EpochContext]
    plan: Plan

    def run(self, attempt: int) -> float:
        """Seconds of an attempt."""
        errors: list[Exception] = []

        def work(index: int) -> None:
            try:
                self.run_one(index, attempt)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(self.contexts))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
        seconds = time.perf_counter() - start
        assert not errors, errors
        return seconds

    def run_one(self, index: int, attempt: int) -> None:
        """One device's program, on this thread."""
        job = Job(
            phase="train",
            number=attempt,
            base_version=0,
            data_position=0,
            loss_scale=1.0,
            batches=[_batch(m) for m in range(self.plan.num_microbatches)],
            counted_tokens=SEQUENCE * self.plan.num_microbatches,
            step=OptimizerStep.speculative(version=1, loss_scale=1.0, learning_rate=1e-3),
        )
        context = self.contexts[index]
        run_job(context, job, self.plan.programs[context.device_index], EMULATED_HANDLERS)


def _batch(seed: int) -> MicroBatch:
    tokens = np.random.default_rng(seed).integers(0, 100, (1, SEQUENCE))
    return MicroBatch(input_ids=tokens, labels=tokens)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Takes everything down after the test."""
    with ExitStack() as made:
        yield made


def make_devices(stack: ExitStack, config: Config, emulation: Emulation, plan: Plan) -> Devices:
    """With memories that hold version 0 of all weights."""
    owners = ownership(config, emulation.stored, plan)
    run_id = uuid.uuid4().hex[:12]
    context = zmq.Context()
    stack.callback(context.term)
    memories, addresses = {}, {}
    for node in range(len(config.cluster.nodes)):
        memories[node] = _memory(stack, config, emulation, owners, run_id, node)
        addresses[node] = _served(stack, memories[node])
        optimizer = context.socket(zmq.PULL)  # nobody reads what is announced
        optimizer.bind(_optimizer(run_id, node))
        stack.callback(optimizer.close, 0)
    contexts = []
    for device in range(plan.num_devices):
        reads = _reads(stack, config, emulation, node_of_device(config, device))
        made = EmulatedDevice(
            emulation,
            emulation.stored,
            announce=lambda copy: None,
            leave=partial(reads.board.occupy, source=reads.node),
            peer_memory=_peer_memory(stack, config, reads.node, device),
        )
        contexts.append(
            _context(stack, device, plan, owners, made, memories[reads.node], reads, addresses)
        )
    _connect(contexts, plan, [_optimizer(run_id, node) for node in memories])
    return Devices(contexts, plan)


def _reads(stack: ExitStack, config: Config, emulation: Emulation, node: int) -> NodeReads:
    reads = emulation.reads(config.run_dir, config, node)
    stack.callback(reads.board.close)
    return reads


def _peer_memory(stack: ExitStack, config: Config, node: int, device: int) -> PeerMemory:
    name, workers = config.cluster.nodes[node].name, config.cluster.workers
    board = PeerMemory.of_node(config.run_dir, name, workers, device)
    stack.callback(board.close)
    return board


def _optimizer(run_id: str, node: int) -> str:
    return f"ipc://@penstock-{run_id}-{node}-optimizer"


def _memory(
    stack: ExitStack,
    config: Config,
    emulation: Emulation,
    owners: Ownership,
    run_id: str,
    node: int,
) -> NodeMemory:
    spec = MemorySpec(
        run_id=run_id,
        node_name=config.cluster.nodes[node].name,
        table=emulation.stored,
        layout=NodeLayout.compute(emulation.stored, owners, node),
        undo_bytes=4096,
    )
    memory = NodeMemory.create(spec)
    stack.callback(memory.close)
    stack.callback(memory.unlink)
    for block in memory.owned_blocks():
        memory.control.set_slot_version(block, 0, 0)
    memory.control.set_incarnation(1)
    return memory


def _served(stack: ExitStack, memory: NodeMemory) -> str:
    spec = memory.spec
    address = f"ipc://@penstock-{spec.run_id}-{spec.node_name}-memory"
    server = BlockServer(run_id=spec.run_id, local_address=address, host="127.0.0.1")
    server.start(memory, MemoryMetrics(CollectorRegistry()))
    stack.callback(server.close)
    return server.endpoint


def _context(
    stack: ExitStack,
    index: int,
    plan: Plan,
    owners: Ownership,
    device: EmulatedDevice,
    memory: NodeMemory,
    reads: NodeReads,
    addresses: dict[int, str],
) -> EpochContext:
    spec, node = memory.spec, reads.node
    device.attach(memory, 0, 0)
    stack.callback(device.detach)
    transport = Transport(
        f"ipc://@penstock-{spec.run_id}-worker-{index}", Inbox(), WorkerMetrics(CollectorRegistry())
    )
    stack.callback(transport.close)
    weights = WeightLoader(
        table=spec.table,
        memory=memory,
        ownership=owners,
        node=node,
        device=device,
        remote=RemoteBlocks(
            spec.run_id, spec.table, addresses, lambda context: BlockClient(context, reads)
        ),
    )
    stack.callback(weights.close)
    return EpochContext(
        run_id=spec.run_id,
        epoch=1,
        device_index=index,
        plan=plan,
        routing=TensorRouting.of(plan),
        table=spec.table,
        ownership=owners,
        memory=memory,
        runtime=EmulatedRuntime(spec.table, seed=3),
        device=device,
        meter=NoMeter(),
        weights=weights,
        transport=transport,
        channel=MessageChannel(run_id=spec.run_id, epoch=1, device=device, transport=transport),
        trace=TraceRing(),
        abort=Abort(),
        timeout_s=600.0,
        updates=_updates(stack, index, plan, memory, device),
    )


def _updates(
    stack: ExitStack, index: int, plan: Plan, memory: NodeMemory, device: EmulatedDevice
) -> BlockUpdates | None:
    if index not in plan.updates.values():
        return None
    previewer = EmulatedPreviewer(
        device, memory, OptimizerConfig(), plan=plan, device_index=index, cores=[0]
    )
    updates = BlockUpdates(memory, previewer)
    stack.callback(updates.close)
    return updates


def _with_updates(plan: Plan) -> Plan:
    """Of all blocks, behind the offload of their gradients; no optimizer has to settle them."""

    def behind(instruction: Instruction) -> list[Instruction]:
        if not isinstance(instruction, OffloadGradients):
            return [instruction]
        blocks = plan.backward_stages[instruction.stage].blocks
        return [instruction, *(Update(block=block) for block in blocks)]

    programs = tuple(tuple(i for old in p for i in behind(old)) for p in plan.programs)
    return replace(plan, programs=programs)


def _connect(contexts: list[EpochContext], plan: Plan, optimizers: list[str]) -> None:
    addresses = {context.device_index: context.transport.address for context in contexts}
    for context in contexts:
        index, transport = context.device_index, context.transport
        peers = {peer: address for peer, address in addresses.items() if peer != index}
        transport.connect(peers, dict(enumerate(optimizers)))
        transport.inbox.open(
            run_id=context.run_id,
            epoch=context.epoch,
            expected=Expected.of(
                plan.programs[index],
                plan.evaluation[index],
                2,
                collective_receives(plan, context.routing, index, modelled=True),
            ),
        )


def error_of(stack: ExitStack, name: str, run_dir: Path, attempts: int) -> float:
    """Measured over simulated, less 1, of the nearest of so many attempts."""
    config = config_of(name, run_dir)
    emulation = Emulation.of(config)
    plan = build_plan(config, emulation.table)
    if Opcode.UPDATE in PLANS[name][2]:
        plan = _with_updates(plan)
    there = {i.opcode for program in plan.programs for i in program}
    assert PLANS[name][2] <= there, f"{name} lacks {PLANS[name][2] - there}"
    simulated_s = simulate(plan, emulation.costs, emulation.cluster, stops_early=True).makespan_s
    emulation = replace(emulation, time_scale=CLOCK_S / simulated_s)
    devices = make_devices(stack, config, emulation, plan)
    return min((devices.run(n) / CLOCK_S - 1.0 for n in range(1, attempts + 1)), key=abs)


def test_steps_take_no_less_than_what_is_simulated(stack: ExitStack, tmp_path: Path) -> None:
    """A busy machine only takes longer, so there is no other bound."""
    errors = {name: error_of(stack, name, tmp_path / name, 1) for name in PLANS}
    assert min(errors.values()) > -0.2, errors


@pytest.mark.slow
def test_steps_take_what_is_simulated(stack: ExitStack, tmp_path: Path) -> None:
    """Many plans within 5 % on average, and none far off."""
    errors = {name: error_of(stack, name, tmp_path / name, 3) for name in PLANS}
    assert statistics.mean(map(abs, errors.values())) < 0.05, errors
    assert max(map(abs, errors.values())) < 0.2, errors
