"""Layout of a copy of a run's weights: all files of an export but the numbers that train.

``python -m penstock.models.checkpoints.layout RUN_DIR OUT`` fills an empty folder with
configuration, tokenizer, index, and weight files that have headers and sizes alone. ``layout.json``
(:mod:`penstock.shm.published`) says where memoryd writes the tensors. The finished files have the
bytes of an export (:mod:`penstock.models.checkpoints.export`).

Some exports compute with weights: adapters are merged, and a few types of models are converted by
more than views. The command then writes nothing, and prints ``by state`` and the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.overrides import TorchFunctionMode

from penstock.models.adapters.files import WEIGHTS
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.adapters import PREFIX
from penstock.models.checkpoints.carried import read_carried, write_files
from penstock.models.checkpoints.constants import read_constants
from penstock.models.checkpoints.conversion import published_views
from penstock.models.checkpoints.export import (
    HF,
    PEFT,
    SHARD_BYTES,
    peft_files,
    shard_names,
    shards,
    write_config,
    write_index,
)
from penstock.models.checkpoints.exports.tensors import ExportedTensors
from penstock.models.surgery.hf import load_run_adapter, load_run_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.published import BY_STATE, LAYOUT, PublishedFile, PublishedLayout, PublishedTensor
from penstock.shm.table import DType

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class NoLayoutError(Exception):
    """The export computes with weights, so no layout describes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A tensor of a file: a view of one of the block table, or a constant."""

    block: int
    source: str
    view: torch.Tensor
    constant: torch.Tensor | None = None


def write_layout(
    run_dir: Path, out: Path, form: str, dtype: DType | None, shard_bytes: int = SHARD_BYTES
) -> str:
    """Fills the folder ``out``; returns why there is no layout, or an empty text.

    Raises:
        ConfigError, StateError: files of the run are damaged.
    """
    try:
        if form == PEFT:
            _write_peft(run_dir, out, dtype or DType.FP32)
        else:
            run_dtype = RunDirectory(run_dir).config.model.dtype
            _write_hf(run_dir, out, dtype or run_dtype, shard_bytes)
    except NoLayoutError as error:
        return str(error)
    return ""


def _write_hf(run_dir: Path, out: Path, dtype: DType, shard_bytes: int) -> None:
    run = RunDirectory(run_dir)
    if load_run_adapter(run_dir) is not None:
        raise NoLayoutError("the adapter is merged into the weights")
    source = ExportedTensors.of(
        load_run_config(run_dir),
        run.table,
        lambda block: {},
        dtype=dtype,
        constants=read_constants(run_dir),
    )
    files = write_hf_files(source, out, dtype, owners_of(run), shard_bytes)
    write_files(out, read_carried(run.config, run_dir))
    _write_layout(run, out, files)


def write_hf_files(
    source: ExportedTensors,
    out: Path,
    dtype: DType,
    owners: Mapping[int, int],
    shard_bytes: int = SHARD_BYTES,
) -> list[PublishedFile]:
    """Writes configuration, index, and weight files without the numbers of ``source``. A file has
    blocks of one owner.

    Raises:
        NoLayoutError: a tensor of the files is computed.
    """
    places = {block.index: _published(source, block.index) for block in source.blocks}
    groups = list(shards(source.blocks, dtype, shard_bytes, owners.__getitem__))
    files: list[PublishedFile] = []
    file_of: dict[str, str] = {}
    total_bytes = 0
    write_config(source.hf_config, source.skeleton.model, dtype, out)
    for name, blocks in zip(shard_names(len(groups)), groups, strict=True):
        tensors: dict[str, _Place] = {}
        for block in blocks:
            tensors |= places[block]
        files.append(_write_file(out / name, tensors))
        file_of |= dict.fromkeys(tensors, name)
        total_bytes += sum(place.view.nbytes for place in tensors.values())
    if len(groups) > 1:
        write_index(out, file_of, total_bytes)
    return files


def _write_peft(run_dir: Path, out: Path, dtype: DType) -> None:
    run, settings = RunDirectory(run_dir), load_run_adapter(run_dir)
    assert settings is not None, "only a run with an adapter is written for PEFT"
    hf_config = load_run_config(run_dir)
    skeleton = build_skeleton(hf_config, settings)
    adapter, constants = skeleton.adapter, read_constants(run_dir)
    assert adapter is not None
    owners, places, homes = owners_of(run), dict[str, _Place](), set[int]()
    for block in run.table.blocks:
        for spec in block.tensors:
            if adapter.trains(spec.name):
                view = _placeholder(spec.shape, TORCH_DTYPES[dtype])
                places[PREFIX + spec.name] = _Place(block=block.index, source=spec.name, view=view)
                homes.add(owners[block.index])
        for name in skeleton.parts[block.index].constants:
            if adapter.trains(name):
                value = constants[name].to(TORCH_DTYPES[dtype])
                places[PREFIX + name] = _Place(
                    block=block.index, source=name, view=value, constant=value
                )
    if len(homes) > 1:
        raise NoLayoutError("several nodes have the adapter's tensors, which are in one file")
    file = _write_file(out / WEIGHTS, places)
    write_files(out, peft_files(run_dir, hf_config, settings, skeleton))
    _write_layout(run, out, [file])


def owners_of(run: RunDirectory) -> dict[int, int]:
    """Returns the node that has the weights of each block."""
    return {
        block: node
        for node in range(len(run.config.cluster.nodes))
        for block, name, slot, _ in run.memory_spec(node).layout.arrays
        if (name, slot) == ("weights", 0)
    }


def _published(source: ExportedTensors, block: int) -> dict[str, _Place]:
    """Returns the places of a block's tensors in published files."""
    typed: dict[str, torch.Tensor] = {}
    for spec in source.table.blocks[block].tensors:
        typed[spec.name] = _placeholder(spec.shape, source.dtypes[spec.name])
    for name in source.skeleton.parts[block].constants:
        typed[name] = source.constants[name].to(source.dtypes[name])
    # Views of one tensor have the same storage object, as long as the object is referenced.
    storages = [(value.untyped_storage(), name) for name, value in typed.items()]
    places = {}
    with _Uncopied():
        views = published_views(source.skeleton.model, typed)
    for name, view in views.items():
        storage = view.untyped_storage()
        owner = next((name_of for known, name_of in storages if known is storage), None)
        if owner is None or view.dtype is not typed[owner].dtype:
            raise NoLayoutError(f"{name} is computed from several tensors")
        constant = None if typed[owner].is_meta else view.contiguous()
        places[name] = _Place(block=block, source=owner, view=view, constant=constant)
    return places


class _Uncopied(TorchFunctionMode):
    """Makes copies of tensors in another order views, so that their places can be read."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _write_file(path: Path, places: Mapping[str, _Place]) -> PublishedFile:
    """Writes the header and the constants of a file, and gives the file its size."""
    tensors, start = [], 0
    starts: dict[str, int] = {}
    for name in _file_order(places):
        starts[name] = start
        start += places[name].view.nbytes
    header = _header(starts, places)
    with path.open("wb") as file:
        file.write(header)
        for name, begin in starts.items():
            place, begin = places[name], len(header) + begin
            if place.constant is not None:
                file.seek(begin)
                file.write(_bytes_of(place.constant))
            elif place.view.numel():
                tensors.append(
                    PublishedTensor(
                        block=place.block,
                        source=place.source,
                        offset=int(place.view.storage_offset()),
                        shape=tuple(place.view.shape),
                        strides=place.view.stride(),
                        dtype=_DTYPES[place.view.dtype],
                        start=begin,
                    )
                )
        file.truncate(len(header) + start)
    num_bytes = len(header) + start
    return PublishedFile(name=path.name, num_bytes=num_bytes, tensors=tuple(tensors))


def _file_order(places: Mapping[str, _Place]) -> list[str]:
    """Returns names in the order in which safetensors writes tensors. The order depends on types
    and names, so the library orders tensors without elements.
    """
    empty = {name: torch.empty(0, dtype=place.view.dtype) for name, place in places.items()}
    content = save(empty)
    length = int.from_bytes(content[:8], "little")
    return list(json.loads(content[8 : 8 + length]))


def _header(starts: Mapping[str, int], places: Mapping[str, _Place]) -> bytes:
    """Returns the start of a file, with the bytes that safetensors would write."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, start in starts.items():
        view = places[name].view
        fields[name] = {
            "dtype": _type_name(view.dtype),
            "shape": list(view.shape),
            "data_offsets": [start, start + view.nbytes],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _type_name(dtype: torch.dtype) -> str:
    """Returns the name of a type in files, from the library's own header."""
    content = save({"x": torch.empty(0, dtype=dtype)})
    length = int.from_bytes(content[:8], "little")
    return str(json.loads(content[8 : 8 + length])["x"]["dtype"])


def _bytes_of(value: torch.Tensor) -> bytes:
    flat = value.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _write_layout(run: RunDirectory, out: Path, files: Sequence[PublishedFile]) -> None:
    layout = PublishedLayout(table_digest=run.table.digest, files=tuple(files))
    (out / LAYOUT).write_text(layout.to_json(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.checkpoints.layout", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=(HF, PEFT), default=HF)
    parser.add_argument("--dtype", type=DType, choices=list(DType), help="default: model.dtype")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        reason = write_layout(options.run_dir, options.out, options.format, options.dtype)
        if reason:
            sys.stdout.write(f"{BY_STATE}: {reason}\n")

    return tool_main(work, options.out, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
