"""Run directories of clusters that are not there: the files that a scheduler reads, with a real
plan of a model of small blocks.
"""

from __future__ import annotations

from pathlib import Path

from penstock.config.schema import Config, parse_config
from penstock.host.files import write_atomically
from penstock.planner.planning.configured import build_plan
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec

WORKERS = 8
MICRO_BATCHES = 16
ENDLESS = 10**6


def invented_config(num_nodes: int) -> Config:
    """Returns the configuration of ``num_nodes`` nodes of eight workers: a pipeline on each node,
    as many replicas as nodes.
    """
    return parse_config(
        {
            "run": {"name": f"scale-{num_nodes}"},
            "model": {"hf": {"model_type": "llama"}},
            "data": {"path": "@stdlib", "sequence_length": 8},
            "train": {
                "steps": ENDLESS,
                "micro_batch": 1,
                "global_batch": MICRO_BATCHES * num_nodes,
                "save_every": 0,
            },
            "optimizer": {"lr": 0.5, "schedule": "constant"},
            "schedule": {"scheme": "1f1b", "replicas": num_nodes, "reduce_gradients": True},
            "cluster": {
                "workers": WORKERS,
                "nodes": [{"name": f"n{index}"} for index in range(num_nodes)],
            },
        }
    )


def invented_run(path: Path, num_nodes: int) -> RunDirectory:
    """Makes a run directory with configuration, block table and plan; no model, no data."""
    config = invented_config(num_nodes)
    table = _table(2 * WORKERS + 2)
    run = RunDirectory.create(path)
    write_atomically(path / "resolved.yaml", config.to_yaml())
    write_atomically(path / "table.json", table.to_json())
    write_atomically(path / "plan.json", build_plan(config, table).to_json())
    return run


def _table(num_blocks: int) -> BlockTable:
    blocks = [
        BlockSpec(
            index=index,
            name=f"block{index}",
            kind="layer",
            layer_index=index,
            tensors=(
                TensorSpec(name=f"w{index}", shape=(4, 4), trainable=True, decay=True, offset=0),
            ),
            borrows=(),
            trainable_elements=16,
            frozen_elements=0,
            contributions=1,
            forward_flops=1e9,
            activation_bytes=1e3,
            output_bytes=1e3,
        )
        for index in range(num_blocks)
    ]
    return BlockTable(
        blocks=tuple(blocks),
        weight_dtype=DType.FP32,
        grad_dtype=DType.FP32,
        state_arrays=("exp_avg", "exp_avg_sq"),
        vocab_size=16,
        num_parameters=16 * num_blocks,
    )
