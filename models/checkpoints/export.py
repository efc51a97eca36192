"""Export of a saved state: a folder for ``transformers.AutoModelForCausalLM.from_pretrained``, or
the files of an adapter for PEFT, or weights and optimizer for torch.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig

from penstock.config.adapter import AdapterConfig
from penstock.host.errors import ConfigError
from penstock.host.files import follow_umask, free_bytes, no_room
from penstock.models.adapters.files import SETTINGS, WEIGHTS, settings_fields, to_json
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.adapters import adapter_tensors
from penstock.models.checkpoints.carried import GENERATION, read_carried, write_files
from penstock.models.checkpoints.constants import Constants, read_constants
from penstock.models.checkpoints.exports.dcp import outline_dcp, write_dcp
from penstock.models.checkpoints.exports.tensors import ExportedTensors, ReadBlock, saved_blocks
from penstock.models.checkpoints.exports.torchtitan import TitanLayout, titan_notes
from penstock.models.checkpoints.exports.training import TrainingState, torch_optimizer
from penstock.models.checkpoints.exports.universal import outline_universal, write_universal
from penstock.models.checkpoints.exports.verify import verify_adapter, verify_model
from penstock.models.checkpoints.exports.whole import write_whole
from penstock.models.checkpoints.older_readers import with_older_keys
from penstock.models.surgery.hf import load_run_adapter, load_run_config
from penstock.models.surgery.skeleton import Skeleton, build_skeleton, predicts_masked
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockSpec, BlockTable, DType

ADAPTER_DTYPE = DType.FP32
"""Type of an adapter's tensors: PEFT has them in fp32, also over a narrower model."""

SHARD_BYTES = 2 * 2**30
"""Bytes at which a shard ends, with its last block; the export holds one shard in memory."""

HF, PEFT, DCP, UNIVERSAL = "hf", "peft", "dcp", "universal"
TORCHTITAN = "torchtitan"
"""Formats: the whole model, its adapter alone, and the model with its optimizer for torch, for
DeepSpeed, or for torchtitan.
"""


def export_hf(
    hf_config: PretrainedConfig,
    table: BlockTable,
    read_block: ReadBlock,
    out: Path,
    *,
    dtype: DType,
    carried: Mapping[str, bytes],
    constants: Constants | None = None,
    adapter: AdapterConfig | None = None,
    shard_bytes: int = SHARD_BYTES,
    verifies: bool = False,
) -> None:
    """Writes ``config.json``, safetensors shards and the tokenizer; ``out`` appears whole or not at
    all.

    Tensors have the names and shapes of published files; tied ones are written once. ``carried``
    maps paths below ``out`` to contents; ``constants`` are the persistent buffers of all blocks.
    ``dtype`` does not apply to tensors that transformers keeps in fp32. ``adapter`` is merged into
    the weights. ``verifies``: reads the files back and compares every tensor.

    Raises:
        ConfigError: ``out`` exists and is not an empty directory.
        StateError: a block lacks a tensor, or the tensor's shape differs from the table's. Or a
            verified tensor differs.
    """
    source = ExportedTensors.of(
        hf_config, table, read_block, dtype=dtype, constants=constants or {}, adapter=adapter
    )
    with _appearing(out) as temporary:
        write_config(source.hf_config, source.skeleton.model, dtype, temporary)
        _write_shards(source, dtype, temporary, shard_bytes)
        write_files(temporary, carried)
        if verifies:
            verify_model(source, temporary)


def export_peft(run_dir: Path, state_dir: Path, out: Path, dtype: DType, verifies: bool) -> None:
    """Writes the adapter of a saved state as PEFT does: settings, tensors, and the tokenizer.
    ``out`` appears whole or not at all. ``verifies`` as of :func:`export_hf`.

    Raises:
        ConfigError: the run has no adapter, or ``out`` exists and is not an empty directory.
        StateError: as :func:`export_hf`.
    """
    files, hf_config, settings = (
        RunDirectory(run_dir),
        load_run_config(run_dir),
        load_run_adapter(run_dir),
    )
    if settings is None:
        raise ConfigError(f"{run_dir}: has no adapter (config: adapter); give --format hf")
    skeleton = build_skeleton(hf_config, settings)
    adapter = skeleton.adapter
    assert adapter is not None
    read_block, constants = saved_blocks(state_dir, files.table), read_constants(run_dir)
    source = ExportedTensors.of(
        hf_config, files.table, read_block, dtype=dtype, constants=constants
    )
    tensors: dict[str, torch.Tensor] = {}
    for block in files.table.blocks:
        tensors |= adapter_tensors(source.saved(block.index), adapter, dtype)
    others = peft_files(run_dir, hf_config, settings, skeleton)
    with _appearing(out) as temporary:
        _save(tensors, temporary / WEIGHTS)
        write_files(temporary, others)
        if verifies:
            verify_adapter(tensors, adapter, files.table, temporary)


def peft_files(
    run_dir: Path, hf_config: PretrainedConfig, settings: AdapterConfig, skeleton: Skeleton
) -> dict[str, bytes]:
    """Returns the files of an adapter for PEFT without its weights: settings and tokenizer.
    ``skeleton``: of the model with the adapter.
    """
    adapter, config = skeleton.adapter, RunDirectory(run_dir).config
    assert adapter is not None
    modules = {name: module for name, module in skeleton.model.named_modules() if name}
    kinds = (nn.Linear, nn.Embedding)
    fields = settings_fields(
        settings,
        adapter.modules,
        modules,
        base=config.model.path,
        transposed=any(not isinstance(modules[name], kinds) for name in adapter.modules),
        causal=not predicts_masked(hf_config),
    )
    carried = read_carried(config, run_dir)
    carried.pop(GENERATION, None)
    return {**carried, SETTINGS: to_json(fields).encode()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFormat:
    """A format of weights and optimizer. ``write`` fills a folder with a state; the flag asks for
    a verification. ``outline`` returns the tensors on the meta device by their names in the files.
    ``notes`` returns what differs there.
    """

    write: Callable[[TrainingState, Path, bool], None]
    outline: Callable[[TrainingState], Mapping[str, torch.Tensor]]
    notes: Callable[[TrainingState], Iterable[str]] = lambda state: ()


TRAINING_FORMATS: Mapping[str, TrainingFormat] = MappingProxyType(
    {
        DCP: TrainingFormat(write=write_dcp, outline=outline_dcp),
        UNIVERSAL: TrainingFormat(write=write_universal, outline=outline_universal),
        TORCHTITAN: TrainingFormat(
            write=partial(write_dcp, layout_of=TitanLayout),
            outline=partial(outline_dcp, layout_of=TitanLayout),
            notes=titan_notes,
        ),
    }
)
"""Formats of weights and optimizer by the value of ``--format``."""


def export_training(form: str, state: TrainingState, out: Path, *, verifies: bool) -> None:
    """Writes the weights and the optimizer of a saved state. ``out`` appears whole or not at all.

    Raises:
        ConfigError: ``out`` exists and is not an empty directory. Or torch has no such optimizer.
        StateError: a file of the saved state is damaged. Or a verified tensor differs.
    """
    torch_optimizer(state.optimizer.name)
    with _appearing(out) as temporary:
        TRAINING_FORMATS[form].write(state, temporary, verifies)


def export_whole(
    run_dir: Path, table: BlockTable, read_block: ReadBlock, out: Path, constants: Constants
) -> None:
    """Writes the source folder of the run's text model, with the trained tensors in place of the
    folder's. ``out`` appears whole or not at all.

    Raises:
        ConfigError: ``out`` exists and is not an empty directory, or the model is no part of one.
        StateError: the folder, or a block, is damaged.
    """
    source = ExportedTensors.of(
        load_run_config(run_dir),
        table,
        read_block,
        dtype=table.weight_dtype,
        constants=constants,
        adapter=load_run_adapter(run_dir),
    )
    if source.untied:
        raise ConfigError(
            "--whole: a weight that the model ties to another has an adapter, and the folder's"
            " configuration ties both; give --format peft, or leave --whole out"
        )
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
    files = RunDirectory(run_dir)
    dtype = files.config.model.dtype
    source = ExportedTensors.of(
        load_run_config(run_dir),
        files.table,
        saved_blocks(state_dir, files.table),
        dtype=dtype,
        constants=read_constants(run_dir),
        adapter=load_run_adapter(run_dir),
    )
    model = source.skeleton.model
    write_config(source.hf_config, model, dtype, out)
    write_files(out, read_carried(files.config, run_dir))
    tensors: dict[str, torch.Tensor] = {}
    for block in source.blocks:
        tensors |= source.tensors(block.index)
    return ExportInMemory(model_class=type(model), tensors=tensors, dtype=dtype)


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
        follow_umask(temporary)
        _flush(temporary)
        temporary.rename(out)  # in the same folder, so on the same file system: out appears at once
    except BaseException:  # interrupts, too, must leave nothing behind
        shutil.rmtree(temporary)
        raise


def write_config(hf_config: PretrainedConfig, model: Any, dtype: DType, directory: Path) -> None:
    """Writes ``config.json`` of an export with tensors of ``dtype``."""
    config = copy.deepcopy(hf_config)
    config.architectures = [type(model).__name__]
    config.dtype = TORCH_DTYPES[dtype]
    config.save_pretrained(directory)
    path = directory / "config.json"
    fields = with_older_keys(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shards(source: ExportedTensors, dtype: DType, directory: Path, shard_bytes: int) -> None:
    groups = list(shards(source.blocks, dtype, shard_bytes))
    file_of: dict[str, str] = {}
    total_bytes = 0
    for name, blocks in zip(shard_names(len(groups)), groups, strict=True):
        tensors: dict[str, torch.Tensor] = {}
        for block in blocks:
            tensors |= source.tensors(block)
        assert not tensors.keys() & file_of.keys(), "blocks keep their tensors apart"
        _save(tensors, directory / name)
        file_of |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(groups) > 1:
        write_index(directory, file_of, total_bytes)


def shard_names(count: int) -> list[str]:
    """Returns the names of ``count`` files that together have a model's tensors."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(directory: Path, file_of: Mapping[str, str], total_bytes: int) -> None:
    """Writes the index of several files; ``file_of`` maps tensors to names of files."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    text = json.dumps(index, indent=2, sort_keys=True)
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        needed = sum(tensor.nbytes for tensor in tensors.values())
        if free_bytes(path.parent) < needed:
            raise no_room(path, needed) from error
        raise ConfigError(f"{path}: cannot write it: {error}") from error


def shards(
    exported: Sequence[BlockSpec],
    dtype: DType,
    shard_bytes: int = SHARD_BYTES,
    owner_of: Callable[[int], int] = lambda block: 0,
) -> Iterator[list[int]]:
    """Yields groups of consecutive blocks, one group for a file. Each group has at least
    ``shard_bytes`` bytes, unless the next block is another owner's, or there is none.
    """
    blocks: list[int] = []
    size = 0
    for block in exported:
        if blocks and owner_of(blocks[-1]) != owner_of(block.index):
            yield blocks
            blocks, size = [], 0
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


def _export_model(options: argparse.Namespace) -> None:
    """Exports the model or its adapter, without the optimizer."""
    files = RunDirectory(options.run_dir)
    read_block = saved_blocks(options.state_dir, files.table)
    constants = read_constants(options.run_dir)
    if options.format == PEFT:
        dtype = options.dtype or ADAPTER_DTYPE
        export_peft(options.run_dir, options.state_dir, options.out, dtype, options.verify)
    elif options.whole:
        export_whole(options.run_dir, files.table, read_block, options.out, constants)
    else:
        export_hf(
            load_run_config(options.run_dir),
            files.table,
            read_block,
            options.out,
            dtype=options.dtype or files.config.model.dtype,
            constants=constants,
            carried=read_carried(files.config, options.run_dir),
            adapter=load_run_adapter(options.run_dir),
            verifies=options.verify,
        )


def _export_training(options: argparse.Namespace) -> None:
    """Writes a state with its optimizer, or lists its tensors; prints what differs there."""
    form, state = TRAINING_FORMATS[options.format], _training_state(options)
    if options.list:
        torch_optimizer(state.optimizer.name)
        _print_tensors(form.outline(state).items())
    else:
        export_training(options.format, state, options.out, verifies=options.verify)
    for note in form.notes(state):
        sys.stdout.write(json.dumps({"note": note}) + "\n")


def _print_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        sys.stdout.write(json.dumps(_described(name, tensor)) + "\n")


def _training_state(options: argparse.Namespace) -> TrainingState:
    # The weights are the master weights, which the optimizer keeps in fp32.
    return TrainingState.of(
        options.run_dir,
        options.state_dir,
        step=options.step,
        rate=options.rate,
        samples_seen=options.samples,
        dtype=options.dtype or DType.FP32,
    )


def _outlined(options: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of an export of weights alone, block by block."""
    files = RunDirectory(options.run_dir)
    read_block = saved_blocks(options.state_dir, files.table)
    whole = options.format != PEFT
    default = files.config.model.dtype if whole else ADAPTER_DTYPE
    source = ExportedTensors.of(
        load_run_config(options.run_dir),
        files.table,
        read_block,
        dtype=options.dtype or default,
        constants=read_constants(options.run_dir),
        adapter=load_run_adapter(options.run_dir),
    )
    for block in source.blocks if whole else files.table.blocks:
        if whole:
            yield from source.tensors(block.index).items()
        elif source.adapter is not None:
            tensors = source.saved(block.index)
            yield from adapter_tensors(tensors, source.adapter, options.dtype or default).items()


def _described(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "bytes": tensor.numel() * tensor.element_size(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the export command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.checkpoints.export", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("state_dir", type=Path, help="RUN_DIR/state/step-…, checked by the caller")
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=(HF, PEFT, *TRAINING_FORMATS), default=HF)
    parser.add_argument("--whole", action="store_true", help="with the other parts of the model")
    parser.add_argument("--dtype", type=DType, choices=list(DType), help="default: model.dtype")
    parser.add_argument("--step", type=int, default=0, help="number of the saved step")
    parser.add_argument("--rate", type=float, default=0.0, help="learning rate of the next step")
    parser.add_argument("--samples", type=int, default=0, help="samples of the steps")
    parser.add_argument("--verify", action="store_true", help="read the files back")
    parser.add_argument("--list", action="store_true", help="print the tensors; write nothing")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        if options.format in TRAINING_FORMATS:
            _export_training(options)
        elif options.list:
            _print_tensors(_outlined(options))
        else:
            _export_model(options)

    return tool_main(work, options.out, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
