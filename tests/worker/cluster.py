"""A cluster in one process: real memory and sockets, one interpreter per device on a thread."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import zmq
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig

from penstock._native import undo_bytes
from penstock.config.schema import Config, parse_config
from penstock.config.values import MASKED, NEXT_TOKEN
from penstock.daemons.memory.metrics import MemoryMetrics
from penstock.daemons.memory.server import BlockServer
from penstock.models.binding import pack
from penstock.models.checkpoints.initial import initial_blocks
from penstock.models.compiled import Compiler
from penstock.models.data.batch import MicroBatch
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import resolve_hf_config
from penstock.models.surgery.table import build_table
from penstock.planner.planning.configured import build_plan
from penstock.protocol.plan.instructions import Program
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.step import step_terms
from penstock.protocol.run.names import ipc_address, node_of_device, ownership, storage
from penstock.protocol.run.rundir import MAX_OPTIMIZER_THREADS
from penstock.protocol.wire.frames import GradientReady, decode
from penstock.protocol.wire.local_names import LocalName
from penstock.shm.layout import NodeLayout, Ownership
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.table import BlockTable
from penstock.workers.channels.base import Channel, MessageChannel
from penstock.workers.channels.inbox import Expected, Inbox
from penstock.workers.channels.opening import open_channel, transport_here
from penstock.workers.channels.transport import Transport
from penstock.workers.device import ALIGNMENT_BYTES, WorkerSite, as_tensor
from penstock.workers.epoch import EpochContext, Job
from penstock.workers.interpreter import JobResult, run_job
from penstock.workers.platforms.registry import WorkerPlatform, open_platform
from penstock.workers.state.routing import TensorRouting, collective_receives
from penstock.workers.state.weights import RemoteBlocks, WeightLoader, buffers_needed, stage_bytes
from penstock.workers.telemetry.account import IdleCause, TimeAccount
from penstock.workers.telemetry.metrics import WorkerMetrics
from penstock.workers.telemetry.trace import TraceRing
from penstock.workers.waiting import Abort

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 32,
}
SEQUENCE = 12
TOLERANCE = 1e-6
"""Of sums in fp32, relative: another order of additions."""


def relative_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of any tensor, in norm."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-12))
        for name in wanted
    )


def make_config(
    *,
    scheme: str = "1f1b",
    workers: int = 2,
    nodes: int = 1,
    hf: dict[str, Any] | None = None,
    micro_batches: int = 4,
    model: dict[str, Any] | None = None,
    schedule: dict[str, Any] | None = None,
    freeze: tuple[str, ...] = (),
    grad_dtype: str = "fp32",
    optimizer: dict[str, Any] | None = None,
    device: str = "cpu",
    transport: str = "auto",
    pin_memory: bool = True,
    objective: str = NEXT_TOKEN,
    label_smoothing: float = 0.0,
) -> Config:
    """A small configuration; ``workers`` counts all devices."""
    return parse_config(
        {
            "run": {"seed": 7},
            "model": {"hf": LLAMA | (hf or {}), **(model or {})},
            "data": {"path": "@stdlib", "sequence_length": SEQUENCE, "objective": objective},
            "train": {
                "global_batch": 2 * micro_batches,
                "micro_batch": 2,
                "freeze": freeze,
                "label_smoothing": label_smoothing,
            },
            "optimizer": {"grad_dtype": grad_dtype, **(optimizer or {})},
            "schedule": {"scheme": scheme, **(schedule or {})},
            "cluster": {
                "workers": workers // nodes,
                "device": device,
                "transport": transport,
                "pin_memory": pin_memory,
                "nodes": [{"name": name} for name in "ab"[:nodes]],
            },
        }
    )


def make_batches(config: Config, seed: int) -> tuple[list[MicroBatch], int]:
    """Random tokens; some labels are ignored, and not the same number in each micro-batch."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(config.train.num_microbatches):
        tokens = rng.integers(0, LLAMA["vocab_size"], (config.train.micro_batch, SEQUENCE + 1))
        labels = tokens[:, 1:].copy()
        labels[rng.random(labels.shape) < 0.2] = -100
        batches.append(MicroBatch(input_ids=tokens[:, :-1].copy(), labels=labels))
    return batches, sum(batch.counted_tokens for batch in batches)


@dataclass
class Worker:
    """One device's interpreter with its sockets and metrics."""

    context: EpochContext
    platform: WorkerPlatform
    registry: CollectorRegistry

    def run(self, job: Job, program: Program | None = None) -> JobResult:
        """Execute the device's program of the job's phase."""
        plan, device = self.context.plan, self.context.device_index
        own = plan.programs if job.phase == "train" else plan.evaluation
        program = own[device] if program is None else program
        return run_job(self.context, job, program, self.platform.handlers)

    def metric(self, name: str, **labels: str) -> float:
        """Value of a metric, 0 if it was never set."""
        return self.registry.get_sample_value(name, labels) or 0.0


@dataclass
class Cluster:
    """Everything of one run in this process."""

    config: Config
    hf_config: PretrainedConfig
    table: BlockTable
    plan: Plan
    owners: Ownership
    memories: list[NodeMemory]
    workers: list[Worker]
    optimizers: list[zmq.Socket[bytes]]
    epoch: int = 0

    def job(
        self, *, attempt: int = 1, phase: Any = "train", seed: int = 3, scale: float = 1.0
    ) -> Job:
        """A job on random data at version 0."""
        batches, counted = make_batches(self.config, seed)
        return Job(
            phase=phase,
            number=attempt,
            base_version=0,
            data_position=0,
            loss_scale=scale,
            batches=batches,
            counted_tokens=counted,
        )

    def run(self, job: Job) -> list[JobResult | Exception]:
        """Run the job on all devices at once; what each returned or raised."""
        for worker in self.workers:  # peers may be ahead of a device by one attempt, not by more
            worker.context.transport.inbox.begin(job.phase, job.number)
        results: list[JobResult | Exception] = [RuntimeError("did not run")] * len(self.workers)

        def work(device: int) -> None:
            try:
                results[device] = self.workers[device].run(job)
            except Exception as error:
                results[device] = error

        threads = [threading.Thread(target=work, args=(d,)) for d in range(len(self.workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
            assert not thread.is_alive(), "an interpreter hangs"
        return results

    def train(self, job: Job) -> tuple[float, int]:
        """Run a job that must succeed; loss sum and counted tokens of all devices."""
        results = []
        for result in self.run(job):
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return sum(r.loss_sum for r in results), sum(r.loss_tokens for r in results)

    def gradients(self, target: int = 1) -> dict[str, torch.Tensor]:
        """Summed contributions by tensor name, fp32."""
        found: dict[str, torch.Tensor] = {}
        for block in self.table.blocks:
            total = torch.zeros(block.trainable_elements)
            for k, node in enumerate(self.owners.computed_on[block.index]):
                if block.trainable_elements:
                    array = self.memories[node].grads(block.index, target % 2, k)
                    total += as_tensor(array, self.table.grad_dtype).float()
            for spec in block.tensors:
                if spec.trainable:
                    flat = total[spec.offset : spec.offset + spec.num_elements]
                    found[spec.name] = flat.view(spec.shape)
        return found

    def gradient_bytes(self, target: int = 1) -> list[bytes]:
        """All contributions of all nodes, bit for bit."""
        return [
            memory.grads(b, copy, k).tobytes()
            for memory in self.memories
            for b, name, copy, k in memory.spec.layout.arrays
            if name == "grads" and copy == target % 2
        ]

    def announced(self, node: int, count: int) -> list[tuple[int, int, int]]:
        """(attempt, block, contribution) of the next ``count`` messages to a node's optimizerd,
        sorted.
        """
        found = []
        for _ in range(count):
            assert self.optimizers[node].poll(120_000), f"only {found} were announced"
            message = decode(self.optimizers[node].recv(), GradientReady)
            found.append((message.attempt, message.block, message.contribution))
        return sorted(found)

    def original(self) -> Any:
        """transformers' model with the weights of version 0."""
        masked = self.config.data.objective == MASKED
        kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        model = kind.from_config(self.hf_config, dtype=torch.float32)
        model.train()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.weights().items():
                parameters[name].copy_(value)
        return model

    def reference(self, job: Job) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss sum and gradients of a plain loop over the same weights."""
        model, total = self.original(), 0.0
        parameters = dict(model.named_parameters())
        for batch in job.batches:
            logits = model(input_ids=torch.from_numpy(batch.input_ids)).logits
            labels = torch.from_numpy(batch.labels).flatten()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels, reduction="sum", ignore_index=-100
            )
            (loss * job.loss_weight).backward()
            total += loss.item()
        grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        return total, grads

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of version 0 by tensor name, widened to fp32."""
        found = {}
        for block in self.table.blocks:
            memory = self.memories[self.owners.owner[block.index]]
            arrays = {True: memory.weights(block.index, 0), False: memory.frozen(block.index)}
            for spec in block.tensors:
                flat = as_tensor(arrays[spec.trainable], self.table.weight_dtype).float()
                part = flat[spec.offset : spec.offset + spec.num_elements]
                found[spec.name] = part.view(spec.shape)
        return found

    def contributions(self, node: int) -> list[tuple[int, int]]:
        """(block, contribution) of everything that is summed up for blocks of a node."""
        return sorted(
            (block.index, k)
            for block in self.table.blocks
            if self.owners.owner[block.index] == node
            for k in range(len(self.owners.computed_on[block.index]))
        )

    def check_finished(self, job: Job) -> None:
        """Every gradient was announced once, to its owner; nothing is left of the attempt."""
        for node in range(len(self.memories)):
            expected = [(job.number, b, k) for b, k in self.contributions(node)]
            assert self.announced(node, len(expected)) == expected
            assert not self.optimizers[node].poll(0), "announced twice"
        for worker in self.workers:
            assert len(worker.context.transport.inbox) == 0
            assert worker.context.weights.in_use == ()

    def abort_all(self) -> None:
        """What Drain does to every worker."""
        for worker in self.workers:
            worker.context.abort.set("drained")

    def adopt(self, plan: Plan) -> None:
        """Run another plan from now on, whose gradients lie where this one's do."""
        assert ownership(self.config, self.table, plan) == self.owners, "needs other memory"
        self.plan = plan
        for worker in self.workers:
            worker.context = replace(worker.context, plan=plan, routing=TensorRouting.of(plan))
        self.begin(self.epoch + 1)

    def spoil_gradients(self) -> None:
        """Nothing of an earlier attempt can pass for a gradient of the next."""
        for memory in self.memories:
            for b, name, copy, k in memory.spec.layout.arrays:
                if name == "grads":
                    memory.grads(b, copy, k).view("u1")[:] = 0xFF

    def begin(self, epoch: int) -> None:
        """Enter an epoch: fresh connections, inboxes and flags, as after Drain and Begin."""
        self.epoch = epoch
        peers = {d: w.context.transport.address for d, w in enumerate(self.workers)}
        optimizers = {n: s.get_string(zmq.LAST_ENDPOINT) for n, s in enumerate(self.optimizers)}
        modelled = self.config.cluster.platform.simulated_clock
        for device, worker in enumerate(self.workers):
            transport, routing = worker.context.transport, worker.context.routing
            collective = collective_receives(self.plan, routing, device, modelled=modelled)
            transport.connect({d: a for d, a in peers.items() if d != device}, optimizers)
            transport.inbox.open(
                run_id=worker.context.run_id,
                epoch=epoch,
                expected=Expected.of(
                    self.plan.programs[device], self.plan.evaluation[device], 2, collective
                ),
            )
            transport.notices.open(run_id=worker.context.run_id, epoch=epoch)
            worker.context = replace(worker.context, epoch=epoch, abort=Abort())
        self.open_channels()

    def close_channels(self) -> None:
        """As Drain does."""
        for worker in self.workers:
            worker.context.channel.close()

    def open_channels(self) -> None:
        """All at once: they may meet."""
        name = transport_here(self.config)
        self.close_channels()

        def open_one(worker: Worker) -> Channel:
            context = worker.context
            return open_channel(
                config=self.config,
                plan=self.plan,
                run_id=context.run_id,
                epoch=context.epoch,
                device_index=context.device_index,
                device=context.device,
                transport=context.transport,
                name=name,
                abort=context.abort,
                timeout_s=context.timeout_s,
            )

        with ThreadPoolExecutor(len(self.workers)) as pool:
            channels = list(pool.map(open_one, self.workers))
        for worker, channel in zip(self.workers, channels, strict=True):
            worker.context = replace(worker.context, channel=channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """What the workers of a cluster share."""

    config: Config
    hf_config: PretrainedConfig
    plan: Plan
    owners: Ownership
    memories: list[NodeMemory]
    servers: dict[int, str]
    timeout_s: float
    constants: dict[str, torch.Tensor] | None


def build_cluster(
    stack: ExitStack,
    config: Config,
    *,
    timeout_s: float = 20.0,
    undo: bool = False,
    constants: dict[str, torch.Tensor] | None = None,
) -> Cluster:
    """Memory with initial weights, and a worker for each device; ``stack`` takes it down.

    ``undo``: with room for what optimizer threads need to be undone. ``constants``: as workers
    have them.
    """
    hf_config = resolve_hf_config(config, tokenizer_vocab_size=None, eos=None)
    table = build_table(config, hf_config)
    plan = build_plan(config, table)
    owners = ownership(config, table, plan)
    run_id = uuid.uuid4().hex[:12]
    context = zmq.Context()
    stack.callback(context.term)
    memories, servers, optimizers = [], {}, []
    for index, node in enumerate(config.cluster.nodes):
        spec = MemorySpec(
            run_id=run_id,
            node_name=node.name,
            table=table,
            layout=NodeLayout.compute(table, owners, index, storage(config, plan)),
            undo_bytes=undo_bytes(MAX_OPTIMIZER_THREADS) if undo else 4096,
            step_terms=step_terms(config),
        )
        memories.append(memory := NodeMemory.create(spec))
        stack.callback(memory.close)
        stack.callback(memory.unlink)
        servers[index] = _serve(stack, memory, run_id, node.name)
        optimizers.append(socket := context.socket(zmq.PULL))
        address = ipc_address(run_id, node.name, "optimizer")
        stack.callback(LocalName.take(address, "optimizerd").release)
        socket.bind(address)
        stack.callback(socket.close, 0)
    _fill(config, hf_config, table, owners, memories)
    site = _Site(
        config=config,
        hf_config=hf_config,
        plan=plan,
        owners=owners,
        memories=memories,
        servers=servers,
        timeout_s=timeout_s,
        constants=constants,
    )
    workers = [_worker(stack, site, device) for device in range(plan.num_devices)]
    cluster = Cluster(config, hf_config, table, plan, owners, memories, workers, optimizers)
    stack.callback(cluster.close_channels)
    cluster.begin(1)
    return cluster


def _serve(stack: ExitStack, memory: NodeMemory, run_id: str, node: str) -> str:
    address = ipc_address(run_id, node, "memory")
    server = BlockServer(run_id=run_id, local_address=address, host="127.0.0.1")
    server.start(memory, MemoryMetrics(CollectorRegistry()))
    stack.callback(server.close)
    return server.endpoint


def _fill(
    config: Config,
    hf_config: PretrainedConfig,
    table: BlockTable,
    owners: Ownership,
    memories: list[NodeMemory],
) -> None:
    for b, tensors in initial_blocks(config, hf_config, table, range(len(table.blocks))):
        memory = memories[owners.owner[b]]
        arrays = (memory.weights(b, 0), memory.frozen(b))
        for target, source in zip(arrays, pack(table.blocks[b], tensors), strict=True):
            if target.size:
                as_tensor(target, table.weight_dtype).copy_(torch.from_numpy(source))
    for memory in memories:
        for b in memory.owned_blocks():
            memory.control.set_slot_version(b, 0, 0)
        memory.control.set_incarnation(1)


def _worker(stack: ExitStack, site: _Site, device_index: int) -> Worker:
    node = node_of_device(site.config, device_index)
    memory = site.memories[node]
    platform = _platform(stack, site, device_index, memory)
    registry = CollectorRegistry()
    transport = Transport(
        f"ipc://@penstock-{memory.spec.run_id}-worker-{device_index}",
        Inbox(),
        WorkerMetrics(registry),
    )
    stack.callback(transport.close)
    weights = WeightLoader(
        table=memory.spec.table,
        memory=memory,
        ownership=site.owners,
        node=node,
        device=platform.device,
        remote=RemoteBlocks(memory.spec.run_id, memory.spec.table, site.servers),
    )
    stack.callback(weights.close)
    context = _context(site, device_index, memory, platform, weights, transport)
    return Worker(context, platform, registry)


def _platform(
    stack: ExitStack, site: _Site, device_index: int, memory: NodeMemory
) -> WorkerPlatform:
    plan, table = site.plan, memory.spec.table
    platform = open_platform(
        WorkerSite(
            config=site.config,
            table=table,
            run_dir=site.config.run_dir,
            device_index=device_index,
        )
    )
    platform.device.attach(
        memory,
        max(
            stage_bytes(table, stage.blocks, ALIGNMENT_BYTES)
            for stage in plan.forward_stages + plan.backward_stages
        ),
        buffers_needed(plan.programs[device_index], plan.evaluation[device_index]),
    )
    stack.callback(platform.device.detach)
    return platform


def _context(
    site: _Site,
    device_index: int,
    memory: NodeMemory,
    platform: WorkerPlatform,
    weights: WeightLoader,
    transport: Transport,
) -> EpochContext:
    device = platform.device
    runtime = ModelRuntime(
        site.hf_config,
        memory.spec.table,
        device=device.torch_device,
        compute_dtype=device.compute_dtype,
        seed=site.config.run.seed,
        constants=site.constants,
        compiler=Compiler() if site.config.model.compile is True else None,
        label_smoothing=site.config.train.label_smoothing,
    )
    return EpochContext(
        run_id=memory.spec.run_id,
        epoch=0,
        device_index=device_index,
        plan=site.plan,
        routing=TensorRouting.of(site.plan),
        table=memory.spec.table,
        ownership=site.owners,
        memory=memory,
        runtime=runtime,
        device=device,
        meter=platform.meter,
        weights=weights,
        transport=transport,
        channel=MessageChannel(
            run_id=memory.spec.run_id, epoch=0, device=device, transport=transport
        ),
        trace=TraceRing(),
        abort=Abort(),
        timeout_s=site.timeout_s,
        account=_running_account(),
    )


def _running_account() -> TimeAccount:
    account = TimeAccount()
    account.turn(IdleCause.SCHEDULER)
    return account
