"""Export of a model as a directory for ``transformers.AutoModelForCausalLM.from_pretrained``.

``python -m penstock.models.checkpoints.export RUN_DIR STATE_DIR OUT`` exports a saved state of a
run.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from penstock.host.errors import ConfigError, StateError
from penstock.host.files import free_bytes, no_room
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.carried import read_carried, write_files
from penstock.models.checkpoints.constants import Constants, read_constants
from penstock.models.checkpoints.conversion import as_published
from penstock.models.checkpoints.older_readers import with_older_keys
from penstock.models.checkpoints.whole import write_whole
from penstock.models.surgery.hf import load_run_config
from penstock.models.surgery.skeleton import Skeleton, build_skeleton, loaded_dtypes
from penstock.protocol.run.checksums import CONSTANTS
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.saved_base import base_paths
from penstock.shm.table import BlockTable, DType

SHARD_BYTES = 2 * 2**30
"""Bytes at which a shard ends, with its last block; the export holds one shard in memory."""

ReadBlock = Callable[[int], Mapping[str, NDArray[Any]]]
"""Block -> its own tensors by name: fp32, fp16, or bf16 as uint16 bits."""


def export_hf(
    hf_config: PretrainedConfig,
    table: BlockTable,
    read_block: ReadBlock,
    out: Path,
    *,
    dtype: DType,
    carried: Mapping[str, bytes],
    constants: Constants | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes ``config.json``, safetensors shards and the tokenizer; ``out`` appears whole or not at
    all.

    Tensors have the names and shapes of published files; tied ones are written once. ``carried``
    maps paths below ``out`` to contents; ``constants`` are the persistent buffers of all blocks.
    ``dtype`` does not apply to tensors that transformers keeps in fp32.

    Raises:
        ConfigError: ``out`` exists and is not an empty directory.
        StateError: a block lacks a tensor, or the tensor's shape differs from the table's.
    """
    with _appearing(out) as temporary:
        skeleton = build_skeleton(hf_config)
        dtypes = loaded_dtypes(hf_config, TORCH_DTYPES[dtype])
        source = _ExportedTensors(skeleton, table, read_block, dtypes, constants or {})
        _write_config(hf_config, skeleton.model, dtype, temporary)
        _write_shards(source, dtype, temporary, shard_bytes)
        write_files(temporary, carried)


def export_whole(
    run_dir: Path, table: BlockTable, read_block: ReadBlock, out: Path, constants: Constants
) -> None:
    """Writes the source folder of the run's text model, with the trained tensors in place of the
    folder's. ``out`` appears whole or not at all.

    Raises:
        ConfigError: ``out`` exists and is not an empty directory, or the model is no part of one.
        StateError: the folder, or a block, is damaged.
    """
    skeleton = build_skeleton(load_run_config(run_dir))
    source = _ExportedTensors(skeleton, table, read_block, {}, constants)
    with _appearing(out) as temporary:
        write_whole(run_dir, source.named, temporary)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportInMemory:
    """An export with its tensors in memory. ``model_class`` is transformers' class of the model,
    and ``dtype`` the type of its tensors.
    """

    model_class: type
    tensors: Mapping[str, torch.Tensor]
    dtype: DType


def export_in_memory(run_dir: Path, state_dir: Path, out: Path) -> ExportInMemory:
    """Returns the tensors of a saved state as the export's files would have them, and writes the
    export's other files to the folder ``out``.

    Raises:
        StateError: a block lacks a tensor, or the tensor's shape differs from the table's.
    """
    files, hf_config = RunDirectory(run_dir), load_run_config(run_dir)
    dtype = files.config.model.dtype
    skeleton = build_skeleton(hf_config)
    source = _ExportedTensors(
        skeleton,
        files.table,
        saved_blocks(state_dir, files.table),
        loaded_dtypes(hf_config, TORCH_DTYPES[dtype]),
        read_constants(run_dir),
    )
    _write_config(hf_config, skeleton.model, dtype, out)
    write_files(out, read_carried(files.config, run_dir))
    tensors: dict[str, torch.Tensor] = {}
    for block in files.table.blocks:
        if block.tensors:
            tensors |= source.tensors(block.index)
    return ExportInMemory(model_class=type(skeleton.model), tensors=tensors, dtype=dtype)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yields a temporary directory, which becomes ``out`` when the block ends without an error."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; give another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        _flush(temporary)
        temporary.rename(out)  # in the same folder, so on the same file system: out appears at once
    except BaseException:  # interrupts, too, must leave nothing behind
        shutil.rmtree(temporary)
        raise


@dataclass(frozen=True, slots=True)
class _ExportedTensors:
    """The written tensors: those of a table's blocks and their constants. ``dtypes`` maps a name in
    the model to the written type.
    """

    skeleton: Skeleton
    table: BlockTable
    read_block: ReadBlock
    dtypes: Mapping[str, torch.dtype]
    constants: Constants

    def tensors(self, block: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of one block as published files have them.

        Raises:
            StateError: see :meth:`named`.
        """
        # Rounds to nearest even where the type is narrower than the master weights' fp32.
        typed = {name: value.to(self.dtypes[name]) for name, value in self.named(block).items()}
        return as_published(self.skeleton.model, typed)

    def named(self, block: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of one block by their names in the model.

        Raises:
            StateError: the block or the constants lack a tensor, or a shape differs from the
                table's.
        """
        arrays, tensors = self.read_block(block), {}
        for spec in self.table.blocks[block].tensors:
            array = arrays.get(spec.name)
            if array is None or array.shape != spec.shape:
                actual = "nothing" if array is None else f"shape {array.shape}"
                raise StateError(f"tensor {spec.name}: expected shape {spec.shape}, found {actual}")
            value = torch.from_numpy(np.array(array))
            # NumPy has no bf16: such arrays are their bits.
            tensors[spec.name] = value.view(torch.bfloat16) if array.dtype == np.uint16 else value
        for name in self.skeleton.parts[block].constants:
            if name not in self.constants:
                raise StateError(f"{CONSTANTS} of the run lacks {name}")
            tensors[name] = self.constants[name]
        return tensors


def _write_config(hf_config: PretrainedConfig, model: Any, dtype: DType, directory: Path) -> None:
    config = copy.deepcopy(hf_config)
    config.architectures = [type(model).__name__]
    config.dtype = TORCH_DTYPES[dtype]
    config.save_pretrained(directory)
    path = directory / "config.json"
    fields = with_older_keys(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shards(
    source: _ExportedTensors, dtype: DType, directory: Path, shard_bytes: int
) -> None:
    shards = list(_shards(source.table, dtype, shard_bytes))
    file_of: dict[str, str] = {}
    total_bytes = 0
    for number, blocks in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for block in blocks:
            tensors |= source.tensors(block)
        assert not tensors.keys() & file_of.keys(), "blocks keep their tensors apart"
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:
            needed = sum(tensor.nbytes for tensor in tensors.values())
            if free_bytes(directory) < needed:
                raise no_room(directory / name, needed) from error
            raise ConfigError(f"{directory / name}: cannot write it: {error}") from error
        file_of |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def _shards(table: BlockTable, dtype: DType, shard_bytes: int) -> Iterator[list[int]]:
    """Yields groups of consecutive blocks, one group for a file. Each group but the last has at
    least ``shard_bytes`` bytes.
    """
    blocks: list[int] = []
    size = 0
    for block in table.blocks:
        if not block.tensors:
            continue
        blocks.append(block.index)
        size += sum(t.num_elements for t in block.tensors) * dtype.itemsize
        if size >= shard_bytes:
            yield blocks
            blocks, size = [], 0
    if blocks:
        yield blocks


def _flush(directory: Path) -> None:
    """Waits until all files and the directory are on disk: after the rename they count as
    complete.
    """
    for path in (*directory.rglob("*"), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def saved_blocks(state_dir: Path, table: BlockTable) -> ReadBlock:
    """Returns a reader of blocks of a saved state: master weights and frozen ones by name, widened
    to fp32, in the table's shapes. It raises StateError if a file is damaged or missing.
    """

    base = base_paths(state_dir)

    def read_block(block: int) -> dict[str, NDArray[Any]]:
        path, arrays = state_dir / f"block-{block:04d}.safetensors", {}
        specs = table.blocks[block].tensors
        trained = {spec.name: spec.name for spec in specs if spec.trainable}
        frozen = {f"frozen.{spec.name}": spec.name for spec in specs if not spec.trainable}
        for source, keys in ((path, trained), (base.get(block, path), frozen)):
            try:
                with safe_open(source, framework="pt") as file:
                    for key, name in keys.items():
                        arrays[name] = file.get_tensor(key).to(torch.float32).numpy()
            except (OSError, SafetensorError) as error:
                raise StateError(f"{source}: {error}") from error
        return arrays

    return read_block


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the export command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.checkpoints.export", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("state_dir", type=Path, help="RUN_DIR/state/step-…, checked by the caller")
    parser.add_argument("out", type=Path)
    parser.add_argument("--whole", action="store_true", help="with the other parts of the model")
    parser.add_argument("--dtype", type=DType, choices=list(DType), help="default: model.dtype")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        files = RunDirectory(options.run_dir)
        if options.whole:
            read_block = saved_blocks(options.state_dir, files.table)
            constants = read_constants(options.run_dir)
            export_whole(options.run_dir, files.table, read_block, options.out, constants)
            return
        export_hf(
            load_run_config(options.run_dir),
            files.table,
            saved_blocks(options.state_dir, files.table),
            options.out,
            dtype=options.dtype or files.config.model.dtype,
            constants=read_constants(options.run_dir),
            carried=read_carried(files.config, options.run_dir),
        )

    return tool_main(work, options.out, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
