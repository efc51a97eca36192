"""Every optimizer through ``Kernels``: the numbers of its formulas, and repair after a SIGKILL."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.config.optimizers import OptimizerName
from penstock.config.training import GroupConfig, OptimizerConfig
from penstock.daemons.optimizer.kernels import Kernels, RemoteGradients, owned_blocks
from penstock.daemons.optimizer.machine.sweeps import (
    Advance,
    FinishHold,
    FinishInvert,
    FinishSettle,
    Hold,
    Invert,
    Preview,
    Settle,
    Sweep,
)
from penstock.protocol.plan.step import OptimizerStep
from penstock.shm.layout import Ownership
from penstock.shm.memory import NodeMemory
from penstock.shm.table import BlockTable, DType
from tests.optimizer.conftest import make_block, make_table

LR, DECAY, COEFFICIENT = 0.01, 0.1, 0.5
ONE_ARRAY = [OptimizerName.SGD, OptimizerName.LION, OptimizerName.ADAGRAD]
ONE_NODE = Ownership(owner=(0,), computed_on=((0, 0),))


def config_of(name: OptimizerName) -> OptimizerConfig:
    group = GroupConfig(match=("tensor1",), rate=0.5, weight_decay=2 * DECAY)
    return OptimizerConfig(name=name, weight_decay=DECAY, eps=1e-8, groups=(group,))


def table_of(name: OptimizerName, sizes: list[int]) -> BlockTable:
    """One block with two contributions; every second tensor decays."""
    table = make_table([make_block(0, sizes, contributions=2)], DType.FP32, DType.FP32)
    return replace(table, state_arrays=name.traits.state_arrays)


def step_to(version: int) -> OptimizerStep:
    return OptimizerStep(
        version=version, coefficient=COEFFICIENT, learning_rate=LR, bias_step=version
    )


@dataclass
class Formulas:
    """The textbook steps in float64: AdamW and Lion decay the weights, the others the gradient."""

    config: OptimizerConfig
    master: Any
    arrays: list[Any]
    decay: Any
    rate: Any

    def step(self, grad: Any, number: int) -> None:
        """One step with the gradients as they count."""
        decouples = self.config.name in (OptimizerName.ADAMW, OptimizerName.LION)
        if not decouples:
            grad = grad + self.decay * self.master
        change = self._CHANGES[self.config.name](self, grad, number)
        self.master *= 1 - LR * self.rate * self.decay * decouples
        self.master -= LR * self.rate * change

    def _adam(self, grad: Any, number: int) -> Any:
        (beta1, beta2), (first, second) = self.config.betas, self.arrays
        first += (1 - beta1) * (grad - first)
        second += (1 - beta2) * (grad**2 - second)
        root = np.sqrt(second / (1 - beta2**number))
        return first / (1 - beta1**number) / (root + self.config.eps)

    def _sgd(self, grad: Any, number: int) -> Any:
        self.arrays[0] *= self.config.momentum
        self.arrays[0] += grad
        return self.arrays[0]

    def _lion(self, grad: Any, number: int) -> Any:
        (beta1, beta2), [first] = self.config.betas, self.arrays
        direction = np.sign(beta1 * first + (1 - beta1) * grad)
        first += (1 - beta2) * (grad - first)
        return direction

    def _adagrad(self, grad: Any, number: int) -> Any:
        self.arrays[0] += grad**2
        return grad / (np.sqrt(self.arrays[0]) + self.config.eps)

    _CHANGES = {  # noqa: RUF012
        OptimizerName.ADAMW: _adam,
        OptimizerName.ADAM: _adam,
        OptimizerName.SGD: _sgd,
        OptimizerName.LION: _lion,
        OptimizerName.ADAGRAD: _adagrad,
    }


@pytest.fixture
def pool() -> Iterator[_native.Pool]:
    with _native.Pool([0]) as pool:
        yield pool


NewKernels = Callable[[NodeMemory, OptimizerName], Kernels]


@pytest.fixture
def new_kernels(pool: _native.Pool) -> Iterator[NewKernels]:
    made: list[Kernels] = []

    def make(memory: NodeMemory, name: OptimizerName) -> Kernels:
        blocks = owned_blocks(memory)
        remote = RemoteGradients(memory, blocks)
        made.append(Kernels(pool, memory, config_of(name), blocks, remote))
        return made[-1]

    yield make
    for kernels in made:
        kernels.close()


@pytest.mark.parametrize("name", list(OptimizerName))
def test_training_follows_the_formulas(
    name: OptimizerName, new_memory: Any, new_kernels: NewKernels
) -> None:
    table = table_of(name, [300, 85])
    memory = new_memory(table, ONE_NODE)
    kernels, numbers = new_kernels(memory, name), np.random.default_rng(3)
    master, arrays = memory.state(0, "master"), [memory.state(0, a) for a in table.state_arrays]
    master[:] = numbers.standard_normal(master.size, np.float32)
    in_group = np.arange(master.size) >= table.blocks[0].tensors[1].offset
    decay, rate = np.where(in_group, 2 * DECAY, DECAY), np.where(in_group, 0.5, 1.0)
    wide = [array.astype(np.float64) for array in arrays]
    wanted = Formulas(config_of(name), master.astype(np.float64), wide, decay, rate)

    def train(version: int, *sweeps: Sweep) -> None:
        parts = [memory.grads(0, version % 2, k) for k in (0, 1)]
        for part in parts:
            part[:] = numbers.standard_normal(part.size, np.float32)
        for work in sweeps:
            kernels.run(work)
        wanted.step(COEFFICIENT * (parts[0] + parts[1]).astype(np.float64), version)
        close = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(memory.weights(0, version % 2), wanted.master, **close)

    one, two, three, four = map(step_to, (1, 2, 3, 4))
    train(1, Preview(block=0, update=one))
    train(2, Advance(block=0, pending=one, update=two))
    train(3, Settle(block=0, update=two), Preview(block=0, update=three))
    kernels.run(Settle(block=0, update=three))
    before = [array.copy() for array in (master, *arrays)]
    train(4, Hold(block=0, update=four))
    for found, right in zip([master, *arrays], [wanted.master, *wide], strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
    kernels.run(Invert(block=0, update=four))
    # Adagrad's inverse takes the gradient's decay from the weights after the step.
    told = (decay == 0.0) | (name is not OptimizerName.ADAGRAD)
    for found, right in zip([master, *arrays], before, strict=True):
        np.testing.assert_allclose(found[told], right[told], rtol=1e-3, atol=1e-4)


VICTIM = """
import sys
from penstock import _native
from penstock.shm.layout import NodeLayout
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.shm.table import BlockTable
from tests.optimizer import test_kernels as T

run_id, text, name, way = sys.argv[1:]
table = BlockTable.from_json(text)
layout = NodeLayout.compute(table, T.ONE_NODE, 0)
undo = _native.undo_bytes(64)
spec = MemorySpec(run_id=run_id, node_name="a", table=table, layout=layout, undo_bytes=undo)
memory = NodeMemory.attach(spec)
blocks = T.owned_blocks(memory)
remote = T.RemoteGradients(memory, blocks)
config = T.config_of(T.OptimizerName(name))
with _native.Pool([0]) as pool:
    T.Kernels(pool, memory, config, blocks, remote).run(T.WAYS[way][0])
print("missed")
"""
WAYS: dict[str, tuple[Sweep, Sweep]] = {
    "settle": (Settle(block=0, update=step_to(1)), FinishSettle(block=0, update=step_to(1))),
    "hold": (Hold(block=0, update=step_to(1)), FinishHold(block=0, update=step_to(1))),
    "invert": (Invert(block=0, update=step_to(1)), FinishInvert(block=0, update=step_to(1))),
}
"""A sweep, and what finishes it."""


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", ONE_ARRAY)
def test_a_killed_sweep_is_repaired_and_finished_with_its_bytes(
    name: OptimizerName, way: str, new_memory: Any, new_kernels: NewKernels
) -> None:
    table = table_of(name, [4_000_000])
    memory = new_memory(table, ONE_NODE)
    kernels, numbers = new_kernels(memory, name), np.random.default_rng(3)
    state = [memory.state(0, a) for a in ("master", *table.state_arrays)]
    before = [0.1 + numbers.random(array.size, np.float32) for array in state]
    for k in (0, 1):
        memory.grads(0, 1, k)[:] = numbers.standard_normal(state[0].size, np.float32)

    def reset() -> None:
        for array, values in zip(state, before, strict=True):
            array[:] = values

    reset()
    kernels.run(WAYS[way][0])
    wanted = [array.copy() for array in state]
    undo, hits = memory.control.undo_area, 0
    for _ in range(20):
        reset()
        memory.control.clear_history()
        command = [sys.executable, "-c", VICTIM, memory.spec.run_id, table.to_json(), name, way]
        with subprocess.Popen(command) as victim:
            while victim.poll() is None and not _native.undo_state(undo).armed:
                time.sleep(0.0002)
            time.sleep(random.random() * 0.004)
            victim.kill()
        if not _native.undo_state(undo).armed:
            continue
        hits += any(a.tobytes() != w.tobytes() for a, w in zip(state, wanted, strict=True))
        kernels.run(WAYS[way][1])
        for found, right in zip(state, wanted, strict=True):
            assert found.tobytes() == right.tobytes()
        if hits == 2:
            break
    undo.release()
    assert hits == 2
