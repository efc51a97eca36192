"""``python -m penstock.models.checkpoints.loader``: writes a new model's weights into a node's
memory and ends.

Started by memoryd during a restore, when nothing else of the run moves. It fills ``master`` (fp32)
and ``frozen`` (weight dtype) of the blocks the node owns, one block at a time; memoryd derives the
rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig

from penstock.models.checkpoints.initial import initial_blocks, pack
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.loading import INITIAL_VERSION, memory_to_fill, run_loader
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.memory import Array, NodeMemory
from penstock.shm.table import DType


def load_node(run_dir: Path, node_name: str) -> None:
    """Write the initial weights of the blocks that a node owns.

    Raises:
        ConfigError: no such node, or see
        :func:`penstock.models.checkpoints.initial.initial_blocks`.
        StateError: its memory cannot be attached, or see there.
    """
    files = RunDirectory(run_dir)
    hf_config = load_run_config(run_dir)
    with memory_to_fill(files, node_name) as memory:
        fill(memory, files, hf_config)


def fill(memory: NodeMemory, files: RunDirectory, hf_config: PretrainedConfig) -> None:
    """Write ``master`` (fp32) and ``frozen`` (weight dtype) of all blocks that the node owns.

    Raises:
        ConfigError, StateError: see :func:`penstock.models.checkpoints.initial.initial_blocks`.
    """
    owned = memory.owned_blocks()
    for block, tensors in initial_blocks(files.config, hf_config, files.table, owned):
        trainable, frozen = pack(files.table.blocks[block], tensors)
        memory.store_master(block, INITIAL_VERSION, trainable)
        if len(frozen):
            _store(memory.frozen(block), torch.from_numpy(frozen), files.table.weight_dtype)


def _store(place: Array, values: torch.Tensor, dtype: DType) -> None:
    """Copy flat fp32 values into shared memory of as many elements, rounded to ``dtype``; bf16 lies
    in NumPy arrays as its bits (uint16).
    """
    target = torch.from_numpy(place)  # the shared memory itself, not a copy
    (target.view(torch.bfloat16) if dtype is DType.BF16 else target).copy_(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_loader(
        load_node,
        prog="penstock.models.checkpoints.loader",
        description=__doc__,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
