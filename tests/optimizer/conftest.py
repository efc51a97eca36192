"""Small models for optimizerd: block tables, memory, the arithmetic that must come out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock import _native
from penstock.config.training import GroupConfig
from penstock.shm.layout import TWO_COPIES, NodeLayout, Ownership, Storage
from penstock.shm.memory import NUMPY_TYPES, MemorySpec, NodeMemory
from penstock.shm.table import BlockSpec, BlockTable, BorrowedTensor, DType, TensorSpec, padded


def make_block(index: int, sizes: Sequence[int], contributions: int = 1) -> BlockSpec:
    """A block of one trainable vector a size (every second one decays); none: a frozen block."""
    tensors, offset = [], 0
    for number, size in enumerate(sizes):
        name = f"block{index}.tensor{number}"
        tensors.append(
            TensorSpec(
                name=name, shape=(size,), trainable=True, decay=number % 2 == 0, offset=offset
            )
        )
        offset += padded(size)
    if not sizes:
        tensors.append(
            TensorSpec(
                name=f"block{index}.frozen", shape=(16,), trainable=False, decay=False, offset=0
            )
        )
    return BlockSpec(
        index=index,
        name=f"block{index}",
        kind="vectors",
        layer_index=None,
        tensors=tuple(tensors),
        borrows=(),
        trainable_elements=offset,
        frozen_elements=0 if sizes else 16,
        contributions=contributions,
        forward_flops=1.0,
        activation_bytes=1.0,
        output_bytes=1.0,
    )


def make_table(blocks: Sequence[BlockSpec], weight: DType, grad: DType) -> BlockTable:
    """A table; the last block borrows from each block with two contributions."""
    borrows = tuple(
        BorrowedTensor(
            name=b.tensors[0].name, local_name=f"tied{b.index}", owner=b.index, contribution=1
        )
        for b in blocks
        if b.contributions == 2
    )
    last = blocks[-1]
    fields = {name: getattr(last, name) for name in BlockSpec.__dataclass_fields__}
    table = BlockTable(
        blocks=(*blocks[:-1], BlockSpec(**{**fields, "borrows": borrows})),
        weight_dtype=weight,
        grad_dtype=grad,
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=2,
        num_parameters=sum(b.trainable_elements for b in blocks),
    )
    table.validate()
    return table


@dataclass(frozen=True)
class Hyperparameters:
    """What the reference and ``optimizer`` of the configuration have in common."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    groups: tuple[GroupConfig, ...] = (
        GroupConfig(match=(r"\.tensor1$",), rate=0.5, weight_decay=0.3),
    )

    def step_of(self, tensor: TensorSpec) -> tuple[float, float]:
        """Weight decay and rate of a tensor."""
        if tensor.name.endswith(".tensor1"):
            return 0.3, 0.5
        return (self.weight_decay if tensor.decay else 0.0), 1.0


class Reference:
    """The classic in-place step on private arrays: what only the committed records lead to.

    ``half_up``: weights are bf16, rounded half up in the bits, as the upper halves of split masters
    are; the master is whole here all the same.
    """

    def __init__(
        self,
        table: BlockTable,
        pool: _native.Pool,
        blocks: Sequence[int],
        *,
        half_up: bool = False,
    ) -> None:
        self._table = table
        self._half_up = half_up
        self._pool = pool
        self._hyper = Hyperparameters()
        types = {DType.FP32: np.float32, DType.BF16: np.uint16, DType.FP16: np.uint16}
        self._weights_dtype = {
            DType.FP32: _native.WeightsDtype.FLOAT32,
            DType.BF16: _native.WeightsDtype.BFLOAT16,
            DType.FP16: _native.WeightsDtype.FLOAT16,
        }[table.weight_dtype]
        self.arrays: dict[int, dict[str, Any]] = {}
        for b in blocks:
            count = table.blocks[b].trainable_elements
            if count:
                self.arrays[b] = {
                    name: aligned(count, np.float32) for name in ("master", "exp_avg", "exp_avg_sq")
                } | {"weights": aligned(count, types[table.weight_dtype])}

    def initialize(self, random: np.random.Generator) -> None:
        """Random master weights, zero state."""
        for arrays in self.arrays.values():
            arrays["master"][:] = random.standard_normal(len(arrays["master"]), np.float32)
            arrays["exp_avg"][:] = 0
            arrays["exp_avg_sq"][:] = 0
            _native.cast_weights(
                self._pool,
                master=arrays["master"],
                weights=arrays["weights"],
                weights_dtype=self._weights_dtype,
            )
            self._round(arrays)

    def _round(self, arrays: dict[str, Any]) -> None:
        if self._half_up:
            arrays["weights"][:] = (arrays["master"].view(np.uint32) + 0x8000 >> 16) & 0xFFFF

    def fill(self, memory: NodeMemory, version: int = 0) -> None:
        """Write these arrays into a node's memory, as a restore does."""
        control = memory.control
        control.set_incarnation(0)
        control.clear_history()
        for b in memory.owned_blocks():
            control.set_state_version(b, version)
            control.set_slot_version(b, version % 2, version)
            control.set_slot_version(b, 1 - version % 2, 2**64 - 1)
            if b in self.arrays:
                memory.store_master(b, version, self.arrays[b]["master"])
                for name in ("exp_avg", "exp_avg_sq"):
                    memory.state(b, name, version)[:] = self.arrays[b][name]
                weights = memory.weights(b, version % 2)
                weights.view(self.arrays[b]["weights"].dtype)[:] = self.arrays[b]["weights"]
        control.set_committed(version)
        control.set_incarnation(1)

    def step(
        self, block: int, grads: list[Any], *, lr: float, step: int, coefficient: float
    ) -> None:
        """Apply one committed step to a block."""
        arrays, tensors = self.arrays[block], self._table.blocks[block].tensors
        ranges = [
            (t.offset, t.offset + padded(t.num_elements), *self._hyper.step_of(t)) for t in tensors
        ]
        _native.step_in_place(
            self._pool,
            master=arrays["master"],
            arrays=[arrays["exp_avg"], arrays["exp_avg_sq"]],
            weights=arrays["weights"],
            grads=grads,
            weights_dtype=self._weights_dtype,
            hyper=_native.Hyper(
                lr=lr,
                beta1=self._hyper.betas[0],
                beta2=self._hyper.betas[1],
                eps=self._hyper.eps,
                step=step,
                coefficient=coefficient,
            ),
            ranges=ranges,
        )
        self._round(arrays)

    def assert_weights(self, memory: NodeMemory, block: int, version: int) -> None:
        """The slot of ``version`` holds these weights, bit for bit."""
        if block in self.arrays:
            assert memory.weights(block, version % 2).tobytes() == (
                self.arrays[block]["weights"].tobytes()
            ), f"weights of block {block} at version {version}"

    def assert_state(self, memory: NodeMemory, block: int) -> None:
        """Master and state are these, bit for bit."""
        if block not in self.arrays:
            return
        version = memory.control.state_version(block)
        found = {n: memory.state(block, n, version) for n in ("exp_avg", "exp_avg_sq")}
        for name, array in (("master", memory.load_master(block, version)), *found.items()):
            expected = self.arrays[block][name].tobytes()
            assert array.tobytes() == expected, f"{name} of block {block}"


def aligned(count: int, dtype: Any) -> Any:
    """Zeros that start at a multiple of 64 bytes."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(count * itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * itemsize].view(dtype)


def to_gradients(values: Any, dtype: DType) -> Any:
    """fp32 values in the gradient dtype (bf16 by truncation: any bit pattern will do)."""
    if dtype is not DType.BF16:
        return values.astype(NUMPY_TYPES[dtype])
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Toolbox:
    """The helpers above, for tests (which cannot import a conftest)."""

    make_block = staticmethod(make_block)
    make_table = staticmethod(make_table)
    reference = Reference
    aligned = staticmethod(aligned)
    to_gradients = staticmethod(to_gradients)
    hyperparameters = Hyperparameters()


@pytest.fixture(scope="session")
def tools() -> Toolbox:
    """Helpers of this directory."""
    return Toolbox()


MemoryFactory = Callable[[BlockTable, Ownership, int, Storage], NodeMemory]


@pytest.fixture
def new_memory() -> Iterator[MemoryFactory]:
    """Creates a node's memory in a run of its own; removed at the end of the test."""
    created: list[NodeMemory] = []
    run_id = secrets.token_hex(6)

    def create(
        table: BlockTable, ownership: Ownership, node: int = 0, storage: Storage = TWO_COPIES
    ) -> NodeMemory:
        spec = MemorySpec(
            run_id=run_id,
            node_name="ab"[node],
            table=table,
            layout=NodeLayout.compute(table, ownership, node, storage),
            undo_bytes=_native.undo_bytes(64),
        )
        created.append(NodeMemory.create(spec))
        return created[-1]

    yield create
    for memory in created:
        memory.close()
        memory.unlink()
