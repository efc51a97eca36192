"""``python -m penstock.workers.platforms.emulated.loader``: initial weights of an emulated run.

Numbers that follow from (seed, block); no model, no torch. Started by memoryd like
:mod:`penstock.models.checkpoints.loader`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.protocol.run.loading import INITIAL_VERSION, memory_to_fill, run_loader
from penstock.protocol.run.rundir import RunDirectory

_DEVIATION = 0.02


def load_node(run_dir: Path, node_name: str) -> None:
    """Writes ``master`` (and ``frozen``, as zeros) of the blocks that a node owns.

    Raises:
        ConfigError: no such node. StateError: its memory cannot be attached, or holds a model.
    """
    files = RunDirectory(run_dir)
    with memory_to_fill(files, node_name) as memory:
        for block in memory.owned_blocks():
            count = files.table.blocks[block].trainable_elements
            if count:
                source = np.random.Generator(np.random.Philox([files.config.run.seed, block]))
                numbers = source.standard_normal(count, dtype=np.float32)
                memory.store_master(block, INITIAL_VERSION, numbers * np.float32(_DEVIATION))
            if files.table.blocks[block].frozen_elements:
                memory.frozen(block)[:] = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the loader command; returns the exit code."""
    return run_loader(
        load_node,
        prog="penstock.workers.platforms.emulated.loader",
        description=__doc__,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
