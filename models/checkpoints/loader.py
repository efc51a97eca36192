"""``python -m penstock.models.checkpoints.loader``: writes a new model's weights into a node's
memory.

Memoryd starts it during a restore, while the rest of the run waits. It fills ``master`` (fp32) and
``frozen`` (weight dtype) of the blocks that the node owns; memoryd derives the rest. One core draws
some 100 million random numbers a second, so several processes share the blocks of a large model.
Each block has its own numbers, so the bytes do not depend on the number of processes.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig

from penstock.host.limits.cgroup import tightest_memory, usable_cpus
from penstock.models.checkpoints.files import recorded_files
from penstock.models.checkpoints.initial import initial_blocks, pack
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.run.loading import INITIAL_VERSION, memory_to_fill, run_loader
from penstock.protocol.run.process import die_with_parent
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.memory import Array, NodeMemory
from penstock.shm.table import BlockTable, DType

PROCESS_ELEMENTS = 1 << 26
"""Elements that make another process worth its start."""
_ELEMENT_BYTES = 16
"""Private memory of a process for each element of its largest block: drawn, packed, compared."""


def load_node(run_dir: Path, node_name: str) -> None:
    """Writes the initial weights of the blocks that a node owns.

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
    """Writes ``master`` (fp32) and ``frozen`` (weight dtype) of all blocks that the node owns.

    Raises:
        ConfigError, StateError: see :func:`penstock.models.checkpoints.initial.initial_blocks`.
    """
    owned = memory.owned_blocks()
    count = 1 if files.config.model.path is not None else _processes(files.table, owned)
    first, *others = _dealt(files.table, owned, count)
    children = {_start(memory, files, hf_config, share): share for share in others}
    _fill(memory, files, hf_config, first)
    for pid, share in children.items():
        if os.waitpid(pid, 0)[1]:  # a second try in this process: it succeeds, or names the cause
            _fill(memory, files, hf_config, share)


def _processes(table: BlockTable, blocks: Sequence[int]) -> int:
    """Returns the number of processes that the elements are worth, within memory and CPUs."""
    elements = [_elements(table, block) for block in blocks]
    room = tightest_memory().available // (2 * _ELEMENT_BYTES * max(elements, default=1))
    return max(1, min(sum(elements) // PROCESS_ELEMENTS, room, usable_cpus()))


def _dealt(table: BlockTable, blocks: Sequence[int], count: int) -> list[list[int]]:
    """Returns the blocks in ``count`` shares of similar size."""
    shares: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for block in sorted(blocks, key=lambda block: -_elements(table, block)):
        least = sizes.index(min(sizes))
        shares[least].append(block)
        sizes[least] += _elements(table, block)
    return [sorted(share) for share in shares]


def _elements(table: BlockTable, block: int) -> int:
    return table.blocks[block].trainable_elements + table.blocks[block].frozen_elements


def _start(
    memory: NodeMemory, files: RunDirectory, hf_config: PretrainedConfig, share: Sequence[int]
) -> int:
    """Fills a share in a process that dies with this one; returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        torch.set_num_threads(1)  # each has a core
        _fill(memory, files, hf_config, share)
        code = 0
    except BaseException:
        traceback.print_exc()  # nothing of the parent's may run here
    finally:
        sys.stderr.flush()
        os._exit(code)


def _fill(
    memory: NodeMemory, files: RunDirectory, hf_config: PretrainedConfig, blocks: Sequence[int]
) -> None:
    directory = files.config.model.path
    source = None if directory is None else recorded_files(files.path, directory)
    needed = without_bases(files.table, memory)
    # Drawn blocks are drawn whole: a tensor's numbers follow those of the tensors before it.
    table = files.table if directory is None else needed
    blocks = [block for block in blocks if needed.blocks[block].tensors]
    for block, tensors in initial_blocks(files.config, hf_config, table, blocks, source):
        trainable, frozen = pack(table.blocks[block], tensors)
        memory.store_master(block, INITIAL_VERSION, trainable)
        if len(frozen) and not memory.has_complete_base(block):
            _store(memory.frozen(block), torch.from_numpy(frozen), files.table.weight_dtype)


def without_bases(table: BlockTable, memory: NodeMemory) -> BlockTable:
    """Returns the table without the frozen tensors of complete bases, which are not read again."""
    blocks = [
        dataclasses.replace(
            block, tensors=tuple(t for t in block.tensors if t.trainable), frozen_elements=0
        )
        if memory.has_complete_base(block.index)
        else block
        for block in table.blocks
    ]
    return dataclasses.replace(table, blocks=tuple(blocks))


def _store(place: Array, values: torch.Tensor, dtype: DType) -> None:
    """Copies flat fp32 values into shared memory of the same length, rounded to ``dtype``. NumPy
    arrays hold bf16 as its bits (uint16).
    """
    target = torch.from_numpy(place)  # the shared memory itself, not a copy
    (target.view(torch.bfloat16) if dtype is DType.BF16 else target).copy_(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the loader command; returns the exit code."""
    return run_loader(
        load_node,
        prog="penstock.models.checkpoints.loader",
        description=__doc__,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
