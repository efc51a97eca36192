"""Shared by the planner's tests: tables and configurations, a reference executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.protocol.config import Config, parse_config
from penstock.protocol.instructions import (
    Backward,
    FetchWeights,
    Forward,
    Instruction,
    Keep,
    OffloadGradients,
    Phase,
    Recompute,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    ReleaseWeights,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)
from penstock.protocol.plan import Plan
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
    anywhere.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network: dict[tuple[int, int, str, int, int], int] = {}
        self.offloaded: dict[int, int] = {}
        self.workers = [_Worker(self, device) for device in range(plan.num_devices)]

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
        if self.network or any(worker.leftovers() for worker in self.workers):
            raise ExecutionFailed("something is left over")
        if self.offloaded != _train_serially(self.plan):
            raise ExecutionFailed("wrong gradients")


class _Worker:
    def __init__(self, executor: ReferenceExecutor, device: int) -> None:
        self.executor = executor
        self.plan = executor.plan
        self.device = device
        self.weights: dict[tuple[int, str], range] = {}
        self.tensors: dict[tuple[str, int, int], int] = {}
        self.inbox: dict[tuple[str, int, int], int] = {}
        self.graphs: dict[tuple[int, int], tuple[tuple[int, str], list[int], int]] = {}
        self.gradients: dict[int, int] = {}

    def leftovers(self) -> bool:
        return bool(self.weights or self.tensors or self.inbox or self.graphs or self.gradients)

    def execute(self, instruction: Instruction) -> bool:
        """False: blocked, try again later."""
        handler = getattr(self, "_" + instruction.opcode.name.lower())
        return bool(handler(instruction))

    def _input(self, kind: str, stage: int, micro_batch: int) -> int | None:
        """A tensor from here or, through a posted receive, from elsewhere; None while it is on its
        way.
        """
        if (kind, stage, micro_batch) in self.tensors:
            return self.tensors.pop((kind, stage, micro_batch))
        peer = self.inbox[kind, stage, micro_batch]
        value = self.executor.network.pop((peer, self.device, kind, stage, micro_batch), None)
        if value is not None:
            del self.inbox[kind, stage, micro_batch]
        return value

    def _run(self, blocks: range, available: range, x: int) -> tuple[list[int], int]:
        inputs = []
        for block in blocks:
            if block not in available:
                raise KeyError(f"weights of block {block}")
            inputs.append(x)
            x = _apply(block, x)
        return inputs, x

    def _forward(self, f: Forward) -> bool:
        stage = self.plan.forward_stages[f.stage]
        available = self.weights[f.stage, "forward"]
        x = (
            _batch(f.micro_batch)
            if f.stage == 0
            else self._input("activation", f.stage - 1, f.micro_batch)
        )
        if x is None:
            return False
        inputs, y = self._run(stage.blocks, available, x)
        if f.stage < len(self.plan.forward_stages) - 1:
            self.tensors["activation", f.stage, f.micro_batch] = y
        if f.keep is Keep.ALL:
            self.graphs[f.stage, f.micro_batch] = ((f.stage, "forward"), inputs, y)
        if f.keep is Keep.INPUT:
            for b, backward in enumerate(self.plan.backward_stages):
                if b > 0 and backward.start in stage.blocks:
                    value = inputs[backward.start - stage.start]
                    self.tensors["checkpoint", b, f.micro_batch] = value
        return True

    def _buffer(self, stage: int) -> tuple[int, str]:
        if (stage, "backward") in self.weights:
            return stage, "backward"
        return stage, "forward"

    def _recompute(self, r: Recompute) -> bool:
        buffer = self._buffer(r.stage)
        available = self.weights[buffer]
        x = (
            _batch(r.micro_batch)
            if r.stage == 0
            else self._input("checkpoint", r.stage, r.micro_batch)
        )
        if x is None:
            return False
        inputs, y = self._run(self.plan.backward_stages[r.stage].blocks, available, x)
        self.graphs[r.stage, r.micro_batch] = (buffer, inputs, y)
        return True

    def _backward(self, b: Backward) -> bool:
        stage = self.plan.backward_stages[b.stage]
        buffer, inputs, y = self.graphs[b.stage, b.micro_batch]
        last = b.stage == len(self.plan.backward_stages) - 1
        g = y if last else self._input("gradient", b.stage + 1, b.micro_batch)
        if g is None:
            return False
        for block, x in zip(reversed(stage.blocks), reversed(inputs), strict=True):
            if block not in self.weights[buffer]:
                raise KeyError(f"weights of block {block}")
            self.gradients[block] = self.gradients.get(block, 0) + _weight_gradient(x, g)
            g = _input_gradient(block, x, g)
        del self.graphs[b.stage, b.micro_batch]
        if b.stage > 0:
            self.tensors["gradient", b.stage, b.micro_batch] = g
        return True

    def _send(self, kind: str, stage: int, micro_batch: int, peer: int) -> bool:
        tag = (self.device, peer, kind, stage, micro_batch)
        if tag in self.executor.network or peer >= self.plan.num_devices:
            raise KeyError(f"two messages {tag}, or nobody there")
        self.executor.network[tag] = self.tensors.pop((kind, stage, micro_batch))
        return True

    def _post(self, kind: str, stage: int, micro_batch: int, peer: int) -> bool:
        if (kind, stage, micro_batch) in self.inbox:
            raise KeyError("posted twice")
        self.inbox[kind, stage, micro_batch] = peer
        return True

    def _send_activation(self, i: SendActivation) -> bool:
        return self._send("activation", i.stage, i.micro_batch, i.peer)

    def _send_gradient(self, i: SendGradient) -> bool:
        return self._send("gradient", i.stage, i.micro_batch, i.peer)

    def _send_checkpoint(self, i: SendCheckpoint) -> bool:
        return self._send("checkpoint", i.stage, i.micro_batch, i.peer)

    def _recv_activation(self, i: RecvActivation) -> bool:
        return self._post("activation", i.stage, i.micro_batch, i.peer)

    def _recv_gradient(self, i: RecvGradient) -> bool:
        return self._post("gradient", i.stage, i.micro_batch, i.peer)

    def _recv_checkpoint(self, i: RecvCheckpoint) -> bool:
        return self._post("checkpoint", i.stage, i.micro_batch, i.peer)

    def _fetch_weights(self, i: FetchWeights) -> bool:
        stages = self.plan.forward_stages if i.phase is Phase.FORWARD else self.plan.backward_stages
        if (i.stage, i.phase.value) in self.weights or len(self.weights) == 2:
            raise KeyError("no buffer")
        self.weights[i.stage, i.phase.value] = stages[i.stage].blocks
        return True

    def _release_weights(self, i: ReleaseWeights) -> bool:
        del self.weights[i.stage, i.phase.value]
        return True

    def _offload_gradients(self, i: OffloadGradients) -> bool:
        for block in self.plan.backward_stages[i.stage].blocks:
            if block in self.executor.offloaded:
                raise KeyError(f"block {block} offloaded twice")
            self.executor.offloaded[block] = self.gradients.pop(block)
        return True


@pytest.fixture(name="execute")
def _execute() -> Callable[[Plan], None]:
    """Run a plan's programs with numbers; raises ExecutionFailed."""
    return lambda plan: ReferenceExecutor(plan).run()


@pytest.fixture(name="execution_failed")
def _execution_failed() -> type[Exception]:
    return ExecutionFailed
