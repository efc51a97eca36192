"""``python -m penstock.workers.emulated.loader``: initial weights of an emulated run.

Numbers that follow from (seed, block); no model, no torch. Started by memoryd like
:mod:`penstock.models.loader`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.protocol.errors import ExitCode, PenstockError, StateError
from penstock.protocol.names import node_index
from penstock.protocol.process import die_with_parent
from penstock.protocol.rundir import RunDirectory
from penstock.shm.errors import SegmentError
from penstock.shm.layout import SegmentKind
from penstock.shm.memory import NodeMemory

_DEVIATION = 0.02


def load_node(run_dir: Path, node_name: str) -> None:
    """Write ``master`` (and ``frozen``, as zeros) of the blocks that a node owns.

    Raises:
        ConfigError: no such node. StateError: its memory cannot be attached.
    """
    files = RunDirectory(run_dir)
    spec = files.memory_spec(node_index(files.config, node_name))
    try:
        memory = NodeMemory.attach(spec, (SegmentKind.STATE, SegmentKind.FROZEN))
    except SegmentError as error:
        raise StateError(f"memory of node {node_name}: {error}") from error
    try:
        for block in memory.owned_blocks():
            count = files.table.blocks[block].trainable_elements
            if count:
                source = np.random.Generator(np.random.Philox([files.config.run.seed, block]))
                numbers = source.standard_normal(count, dtype=np.float32)
                memory.state(block, "master")[:] = numbers * _DEVIATION
            if files.table.blocks[block].frozen_elements:
                memory.frozen(block)[:] = 0
    finally:
        memory.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.workers.emulated.loader", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="RUN_DIR/resolved.yaml")
    parser.add_argument("--node", required=True, help="name of the node in cluster.nodes")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    try:
        load_node(options.config.parent, options.node)
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return error.exit_code
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
