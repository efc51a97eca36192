"""``python -m penstock.models.checkpoints.exports.frozen``: writes frozen arrays of a run's initial
model, for files of the run's base that are lost or damaged.

Each block has a file ``BLOCK`` with the bytes of its frozen array, as in shared memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.files import recorded_files
from penstock.models.checkpoints.initial import initial_blocks, pack
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory


def write_frozen(run_dir: Path, out: Path, blocks: Sequence[int]) -> None:
    """Writes the frozen arrays of some blocks into the folder ``out``.

    Raises:
        ConfigError, StateError: see :func:`penstock.models.checkpoints.initial.initial_blocks`.
    """
    run = RunDirectory(run_dir)
    config, table, folder = run.config, run.table, run.config.model.path
    files = None if folder is None else recorded_files(run_dir, folder)
    for block, tensors in initial_blocks(config, load_run_config(run_dir), table, blocks, files):
        values = torch.from_numpy(pack(table.blocks[block], tensors)[1])
        rounded = values.to(TORCH_DTYPES[table.weight_dtype]).view(torch.uint8)
        rounded.numpy().tofile(out / str(block))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path, help="an empty folder")
    parser.add_argument("blocks", type=int, nargs="+")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)
    return tool_main(
        lambda: write_frozen(options.run_dir, options.out, options.blocks),
        options.out,
        options.parent_pid,
    )


if __name__ == "__main__":
    sys.exit(main())
