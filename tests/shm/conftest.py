"""A small two-block model and the shared memory of its node, removed after each test."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from penstock.shm.layout import NodeLayout, Ownership, SegmentKind
from penstock.shm.memory import MemorySpec
from penstock.shm.segment import unlink
from penstock.shm.table import BlockSpec, BlockTable, BorrowedTensor, DType, TensorSpec


def make_table(**changes: object) -> BlockTable:
    """Block 0: 20 + 6 trainable elements, 5 frozen; block 1: 10 trainable, borrows from block 0."""
    embedding = BlockSpec(
        index=0,
        name="embed",
        kind="embedding",
        layer_index=None,
        tensors=(
            TensorSpec(name="embed.weight", shape=(4, 5), trainable=True, decay=True, offset=0),
            TensorSpec(name="embed.bias", shape=(6,), trainable=True, decay=False, offset=32),
            TensorSpec(name="embed.scale", shape=(5,), trainable=False, decay=False, offset=0),
        ),
        borrows=(),
        trainable_elements=48,
        frozen_elements=16,
        contributions=2,
        forward_flops=1.0,
        activation_bytes=1.0,
        output_bytes=1.0,
    )
    head = BlockSpec(
        index=1,
        name="head",
        kind="head",
        layer_index=None,
        tensors=(TensorSpec(name="norm", shape=(10,), trainable=True, decay=False, offset=0),),
        borrows=(
            BorrowedTensor(
                name="embed.weight", local_name="lm_head.weight", owner=0, contribution=1
            ),
        ),
        trainable_elements=16,
        frozen_elements=0,
        contributions=1,
        forward_flops=1.0,
        activation_bytes=1.0,
        output_bytes=1.0,
    )
    fields: dict[str, object] = {
        "blocks": (embedding, head),
        "weight_dtype": DType.BF16,
        "grad_dtype": DType.FP32,
        "state_arrays": ("exp_avg", "exp_avg_sq"),
        "vocab_size": 256,
        "num_parameters": 41,
    }
    return BlockTable(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def table() -> BlockTable:
    """The two-block model."""
    return make_table()


@pytest.fixture
def spec(table: BlockTable) -> Iterator[MemorySpec]:
    """Identity of a node that owns both blocks; its segments are removed afterwards."""
    owners = Ownership.from_backward_nodes(table, [0, 0])
    found = MemorySpec(
        run_id=secrets.token_hex(6),
        node_name="a",
        table=table,
        layout=NodeLayout.compute(table, owners, 0),
        undo_bytes=1000,
    )
    yield found
    for kind in SegmentKind:
        unlink(found.name(kind))
