"""Shared by the planner's tests: block tables and configurations without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.protocol.config import Config, parse_config
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
                    name=f"block{index}.weight", shape=(32, 32), trainable=True, decay=True, offset=0
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
    scheme: str = "spipe", *, workers: int = 2, micro_batches: int = 4, nodes: int = 1, **schedule: Any
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
