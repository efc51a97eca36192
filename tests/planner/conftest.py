"""Shared by the planner's tests: tables and configurations, a reference executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing.fitting.capacity import MachineMemory
from penstock.daemons.node.preparing.fitting.planned_run import (
    HostMachine,
    PlannedRun,
    RunRequest,
    plan_run,
)
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.profile import Guess
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    FetchWeights,
    Forward,
    Instruction,
    Keep,
    OffloadGradients,
    Phase,
    Recompute,
    RecomputeAfter,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    ReduceGradients,
    ReleaseWeights,
    SendActivation,
    SendCheckpoint,
    SendGradient,
    SwapIn,
    SwapOut,
    Update,
)
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec

TableFactory = Callable[..., BlockTable]
ConfigFactory = Callable[..., Config]


def make_table(num_blocks: int, *, costs: Sequence[float] | None = None) -> BlockTable:
    """Blocks of 1024 parameters; forward cost 1000 per token unless given."""
    blocks = tuple(
        BlockSpec(
            index=index,
            name=f"block{index}",
            kind="layer",
            layer_index=index,
            tensors=(
                TensorSpec(
                    name=f"block{index}.weight",
                    shape=(32, 32),
                    trainable=True,
                    decay=True,
                    offset=0,
                ),
            ),
            borrows=(),
            trainable_elements=1024,
            frozen_elements=0,
            contributions=1,
            forward_flops=1000.0 if costs is None else costs[index],
            activation_bytes=256.0,
            output_bytes=64.0,
        )
        for index in range(num_blocks)
    )
    return BlockTable(
        blocks=blocks,
        weight_dtype=DType.FP32,
        grad_dtype=DType.FP32,
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=256,
        num_parameters=1024 * num_blocks,
    )


def make_config(
    scheme: str = "spipe",
    *,
    workers: int = 2,
    micro_batches: int = 4,
    nodes: int = 1,
    **schedule: Any,
) -> Config:
    """A configuration with one sequence per micro-batch; ``workers`` per node."""
    return parse_config(
        {
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib", "sequence_length": 8},
            "train": {"global_batch": micro_batches, "micro_batch": 1},
            "schedule": {"scheme": scheme, **schedule},
            "cluster": {"workers": workers, "nodes": [{"name": f"n{i}"} for i in range(nodes)]},
        }
    )


class AnyMachine:
    """A machine with room for every plan."""

    def check(self, config: Config, plan: Plan, costs: Costs) -> None:
        """Takes it."""


ROOM = MachineMemory(ram_available=1 << 50, shm_free=1 << 50, held=0, memlock=None)
"""Memory for every plan."""


def planned(config: Config, table: BlockTable, guess: Guess | None = None) -> PlannedRun:
    """The run of a configuration, planned on a machine with room for it."""
    machine = HostMachine(memory=ROOM, guess=guess)
    return plan_run(RunRequest(config=config, table=table), machine)


@pytest.fixture(name="make_table")
def _make_table() -> TableFactory:
    return make_table


@pytest.fixture(name="make_config")
def _make_config() -> ConfigFactory:
    return make_config


class ExecutionFailed(Exception):
    """The reference executor could not run the plan, or it computed something else."""


_MODULUS = 1_000_003


def _train_serially(plan: Plan) -> dict[int, int]:
    """The gradient of every block, one micro-batch after the other, on one device."""
    gradients = dict.fromkeys(range(plan.num_blocks), 0)
    for m in range(plan.num_microbatches):
        inputs, x = [], _batch(m)
        for block in range(plan.num_blocks):
            inputs.append(x)
            x = _apply(block, x)
        g = x
        for block in reversed(range(plan.num_blocks)):
            gradients[block] += _weight_gradient(inputs[block], g)
            g = _input_gradient(block, inputs[block], g)
    return gradients


def _batch(micro_batch: int) -> int:
    return 1000 + micro_batch


def _apply(block: int, x: int) -> int:
    return (x * 31 + block * 7 + 3) % _MODULUS


def _weight_gradient(x: int, g: int) -> int:
    return (x * 13 + g * 5) % _MODULUS


def _input_gradient(block: int, x: int, g: int) -> int:
    return (g * 17 + x * 11 + block) % _MODULUS


class ReferenceExecutor:
    """Runs a plan with numbers for tensors, written without looking at the validator.

    A channel is a dictionary by tag, receives are posted by tag, dictionaries of what is missing
    raise KeyError. In the end every gradient must equal the serial one and nothing may be left
    anywhere. Where gradients are reduced there is a second replica with the same data. Swapped
    graphs, sharded weights and updates are what all devices share.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network: dict[tuple[int, int, str, int, int], int] = {}
        self.swapped: dict[SwapKey, Graph] = {}
        self.offloaded: dict[int, dict[int, int]] = {}
        self.updated: set[int] = set()
        self.collectives: list[tuple[str, range, int]] = []
        instructions = [i for program in plan.programs for i in program]
        self.forwards = {(i.stage, i.micro_batch) for i in instructions if isinstance(i, Forward)}
        self.replicas = 1 + any(isinstance(i, ReduceGradients) for i in instructions)
        self.workers = [Worker(self, device) for device in range(plan.num_devices)]

    def run(self) -> None:
        programs = self.plan.programs
        counters = [0] * len(programs)
        progress = True
        try:
            while progress:
                progress = False
                for device, program in enumerate(programs):
                    while counters[device] < len(program):
                        if not self.workers[device].execute(program[counters[device]]):
                            break
                        counters[device] += 1
                        progress = True
        except (KeyError, IndexError, ValueError) as error:
            raise ExecutionFailed(repr(error)) from error
        if any(c < len(p) for c, p in zip(counters, programs, strict=True)):
            raise ExecutionFailed("deadlock")
        if self.network or self.swapped or any(worker.leftovers() for worker in self.workers):
            raise ExecutionFailed("something is left over")
        if any(entered < len(programs) for _, _, entered in self.collectives):
            raise ExecutionFailed("a collective that not all entered")
        if self.gradients() != _train_serially(self.plan):
            raise ExecutionFailed("wrong gradients")

    def gradients(self) -> dict[int, float]:
        """The mean over replicas, summed over the routes."""
        totals: dict[int, float] = {}
        for gradients in self.offloaded.values():
            for block, gradient in gradients.items():
                totals[block] = totals.get(block, 0) + gradient / self.replicas
        return totals

    def enter(self, number: int, kind: str, blocks: range) -> None:
        if number == len(self.collectives):
            self.collectives.append((kind, blocks, 0))
        expected_kind, expected_blocks, entered = self.collectives[number]
        if (kind, blocks) != (expected_kind, expected_blocks):
            raise ValueError(f"collective {number} is another one elsewhere")
        self.collectives[number] = (kind, blocks, entered + 1)


SwapKey = tuple[int, int, int, float, int | None]


class Blocked(Exception):
    """Try again later; nothing has been consumed yet."""


@dataclasses.dataclass
class Weights:
    """A fetched buffer; an object of its own for every fetch."""

    blocks: range
    collective: int | None


@dataclasses.dataclass
class Graph:
    """Inputs of all blocks (``None``: dropped), the output, the buffer that was used."""

    inputs: list[int | None]
    output: int
    weights: Weights


class Worker:
    def __init__(self, executor: ReferenceExecutor, device: int) -> None:
        self.executor = executor
        self.plan = executor.plan
        self.device = device
        self.weights: dict[tuple[int, str], Weights] = {}
        self.tensors: dict[tuple[str, int, int], int] = {}
        self.inbox: dict[tuple[str, int, int], int] = {}
        self.graphs: dict[tuple[int, int], Graph] = {}
        self.deferred: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.gradients: dict[int, dict[int, int]] = {}
        self.entered = 0

    def leftovers(self) -> bool:
        return bool(
            self.weights
            or self.tensors
            or self.inbox
            or self.graphs
            or self.deferred
            or self.gradients
        )

    def execute(self, instruction: Instruction) -> bool:
        """False: blocked, try again later."""
        handler = getattr(self, "_" + instruction.opcode.name.lower())
        try:
            handler(instruction)
        except Blocked:
            return False
        return True

    def _await(self, kind: str, stage: int, micro_batch: int) -> None:
        if (kind, stage, micro_batch) not in self.tensors:
            peer = self.inbox[kind, stage, micro_batch]
            if (peer, self.device, kind, stage, micro_batch) not in self.executor.network:
                raise Blocked

    def _input(self, kind: str, stage: int, micro_batch: int) -> int:
        """A tensor from here or, through a posted receive, from elsewhere."""
        self._await(kind, stage, micro_batch)
        if (kind, stage, micro_batch) in self.tensors:
            return self.tensors.pop((kind, stage, micro_batch))
        peer = self.inbox.pop((kind, stage, micro_batch))
        return self.executor.network.pop((peer, self.device, kind, stage, micro_batch))

    def _usable(self, weights: Weights) -> Weights:
        number = weights.collective
        if number is not None and self.executor.collectives[number][2] < self.plan.num_devices:
            raise Blocked
        return weights

    def _backward_weights(self, stage: int, graph: Graph | None) -> Weights:
        if graph is not None and not self.plan.rebinds_weights:
            if not any(weights is graph.weights for weights in self.weights.values()):
                raise KeyError(f"the buffer that stage {stage} was computed with")
            return self._usable(graph.weights)
        own, shared = (stage, "backward"), (stage, "forward")
        return self._usable(self.weights[own if own in self.weights else shared])

    def _run(self, blocks: range, weights: Weights, x: int) -> tuple[list[int], int]:
        inputs = []
        for block in blocks:
            if block not in weights.blocks:
                raise KeyError(f"weights of block {block}")
            inputs.append(x)
            x = _apply(block, x)
        return inputs, x

    def _forward(self, f: Forward) -> None:
        s, m = f.stage, f.micro_batch
        stage = self.plan.forward_stages[s]
        if (self.plan.routes[m] if self.plan.routes else 0) != _route(self.plan.forward_stages, s):
            raise ValueError(f"micro-batch {m} on a stage of another route")
        weights = self._usable(self.weights[s, "forward"])
        x = _batch(m) if stage.start == 0 else self._input("activation", s - 1, m)
        inputs, y = self._run(stage.blocks, weights, x)
        checkpoints = {
            backward.start: b
            for b, backward in enumerate(self.plan.backward_stages)
            if _route(self.plan.backward_stages, b) == _route(self.plan.forward_stages, s)
        }
        if stage.stop < self.plan.num_blocks:
            if (s + 1, m) in self.executor.forwards:
                self.tensors["activation", s, m] = y
            elif stage.stop in checkpoints:
                self.tensors["checkpoint", checkpoints[stage.stop], m] = y
        if f.keep is Keep.ALL:
            self.graphs[s, m] = Graph(list(inputs), y, weights)
        if f.keep is Keep.SELECTIVE:
            self.graphs[s, m] = Graph([inputs[0], *(None for _ in inputs[1:])], y, weights)
        if f.keep is Keep.INPUT:
            for block, value in zip(stage.blocks, inputs, strict=True):
                if block > 0 and block in checkpoints:
                    self.tensors["checkpoint", checkpoints[block], m] = value

    def _recompute(self, r: Recompute) -> None:
        b, m = r.stage, r.micro_batch
        blocks = self.plan.backward_stages[b].blocks
        graph = self.graphs.get((b, m))
        weights = self._backward_weights(b, graph)
        if r.after is RecomputeAfter.GRADIENT and blocks.stop < self.plan.num_blocks:
            self._await("gradient", b + 1, m)
        if graph is not None:
            kept = graph.inputs[0]
            assert kept is not None
            x = kept
        else:
            x = _batch(m) if blocks.start == 0 else self._input("checkpoint", b, m)
        inputs, y = self._run(blocks, weights, x)
        self.graphs[b, m] = Graph(list(inputs), y, weights)

    def _backward(self, work: Backward) -> None:
        for block, gradient in self._split(work.stage, work.micro_batch):
            self._accumulate(work.stage, block, gradient)

    def _backward_input(self, work: BackwardInput) -> None:
        found = self._split(work.stage, work.micro_batch)
        if (work.stage, work.micro_batch) in self.deferred:
            raise KeyError("deferred before")
        self.deferred[work.stage, work.micro_batch] = found

    def _backward_weight(self, work: BackwardWeight) -> None:
        for m in work.micro_batches:
            for block, gradient in self.deferred.pop((work.stage, m)):
                self._accumulate(work.stage, block, gradient)

    def _split(self, b: int, m: int) -> list[tuple[int, int]]:
        """Hand the input gradient on; returns the weight gradients."""
        stage = self.plan.backward_stages[b]
        graph = self.graphs[b, m]
        weights = self._backward_weights(b, graph)
        last = stage.stop == self.plan.num_blocks
        g = graph.output if last else self._input("gradient", b + 1, m)
        found = []
        for block, x in zip(reversed(stage.blocks), reversed(graph.inputs), strict=True):
            if x is None or block not in weights.blocks:
                raise KeyError(f"weights or input of block {block}")
            found.append((block, _weight_gradient(x, g)))
            g = _input_gradient(block, x, g)
        del self.graphs[b, m]
        if stage.start > 0:
            self.tensors["gradient", b, m] = g
        return found

    def _accumulate(self, stage: int, block: int, gradient: int) -> None:
        found = self.gradients.setdefault(stage, {})
        found[block] = found.get(block, 0) + gradient

    def _send(self, kind: str, stage: int, micro_batch: int, peer: int) -> None:
        tag = (self.device, peer, kind, stage, micro_batch)
        if tag in self.executor.network or peer >= self.plan.num_devices:
            raise KeyError(f"two messages {tag}, or nobody there")
        self.executor.network[tag] = self.tensors.pop((kind, stage, micro_batch))

    def _post(self, kind: str, stage: int, micro_batch: int, peer: int) -> None:
        if (kind, stage, micro_batch) in self.inbox:
            raise KeyError("posted twice")
        self.inbox[kind, stage, micro_batch] = peer

    def _send_activation(self, i: SendActivation) -> None:
        self._send("activation", i.stage, i.micro_batch, i.peer)

    def _send_gradient(self, i: SendGradient) -> None:
        self._send("gradient", i.stage, i.micro_batch, i.peer)

    def _send_checkpoint(self, i: SendCheckpoint) -> None:
        self._send("checkpoint", i.stage, i.micro_batch, i.peer)

    def _recv_activation(self, i: RecvActivation) -> None:
        self._post("activation", i.stage, i.micro_batch, i.peer)

    def _recv_gradient(self, i: RecvGradient) -> None:
        self._post("gradient", i.stage, i.micro_batch, i.peer)

    def _recv_checkpoint(self, i: RecvCheckpoint) -> None:
        self._post("checkpoint", i.stage, i.micro_batch, i.peer)

    def _fetch_weights(self, i: FetchWeights) -> None:
        stages = self.plan.forward_stages if i.phase is Phase.FORWARD else self.plan.backward_stages
        if (i.stage, i.phase.value) in self.weights:
            raise KeyError("fetched twice")
        if len(self.weights) == self.plan.weight_buffers:
            raise KeyError("no buffer")
        blocks = stages[i.stage].blocks
        number = self._enter("gather", blocks) if self.plan.shards_weights else None
        self.weights[i.stage, i.phase.value] = Weights(blocks, number)

    def _enter(self, kind: str, blocks: range) -> int:
        self.executor.enter(self.entered, kind, blocks)
        self.entered += 1
        return self.entered - 1

    def _release_weights(self, i: ReleaseWeights) -> None:
        del self.weights[i.stage, i.phase.value]

    def _reduce_gradients(self, i: ReduceGradients) -> None:
        self.gradients[i.stage] = {
            block: gradient * self.executor.replicas
            for block, gradient in self.gradients[i.stage].items()
        }
        if self.plan.shards_weights:
            self._enter("scatter", self.plan.backward_stages[i.stage].blocks)

    def _offload_gradients(self, i: OffloadGradients) -> None:
        if i.stage in self.executor.offloaded:
            raise KeyError(f"stage {i.stage} offloaded twice")
        self.executor.offloaded[i.stage] = self.gradients.pop(i.stage)

    def _update(self, i: Update) -> None:
        for b, stage in enumerate(self.plan.backward_stages):
            if i.block in stage.blocks and b not in self.executor.offloaded:
                raise Blocked
        if i.block in self.executor.updated or i.block >= self.plan.num_blocks:
            raise KeyError(f"block {i.block} updated twice, or there is none")
        self.executor.updated.add(i.block)

    def _swap_out(self, i: SwapOut) -> None:
        if i.peer is not None and (i.peer == self.device or i.peer >= self.plan.num_devices):
            raise ValueError(f"cannot swap to {i.peer}")
        self.executor.swapped[self._swap_key(i)] = self.graphs.pop((i.stage, i.micro_batch))

    def _swap_in(self, i: SwapIn) -> None:
        self.graphs[i.stage, i.micro_batch] = self.executor.swapped.pop(self._swap_key(i))

    def _swap_key(self, i: SwapOut | SwapIn) -> SwapKey:
        return self.device, i.stage, i.micro_batch, i.fraction, i.peer


def _route(stages: tuple[StageRange, ...], index: int) -> int:
    return sum(stage.start == 0 for stage in stages[: index + 1]) - 1


@pytest.fixture(name="execute")
def _execute() -> Callable[[Plan], None]:
    """Run a plan's programs with numbers; raises ExecutionFailed."""
    return lambda plan: ReferenceExecutor(plan).run()


@pytest.fixture(name="execution_failed")
def _execution_failed() -> type[Exception]:
    return ExecutionFailed
