"""``python -m penstock.models.exchange.importing RUN_DIR SRC REPORT``: writes a checkpoint of
another trainer as the files of a saved state.

The report of every tensor is written first. If the caller asks, files follow, one tensor at a time,
and the report gets their sizes and checksums. The caller completes the saved state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from penstock.host.errors import ConfigError, StateError
from penstock.host.files import write_atomically, writing
from penstock.host.limits.bounds import Bounds
from penstock.host.trust import printable
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.mapped import MappedFile
from penstock.models.exchange.foreign import MASTER, WEIGHT, ForeignState
from penstock.models.exchange.mapping import (
    FROZEN,
    Assignment,
    ImportOptions,
    ImportPlan,
    plan_import,
)
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.surgery.hf import load_run_adapter, load_run_config
from penstock.models.surgery.skeleton import build_skeleton
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.saved_base import FILE_DTYPES, file_header
from penstock.shm.table import DType

PIECE_ELEMENTS = 1 << 22
"""Elements that are converted at once."""
_SHOWN_PROBLEMS = 3
_SQUARES = ("exp_avg_sq", "sum")
"""Arrays of squared gradients: of Adam and of Adagrad."""
Say = Callable[[str], None]


def import_checkpoint(
    run_dir: Path,
    source: Path,
    report: Path,
    options: ImportOptions,
    *,
    into: Path | None = None,
    verifies: bool = False,
    say: Say = lambda line: None,
) -> None:
    """Writes the report of an import and, with ``into``, the files of the saved state.

    ``verifies``: reads the files back, and compares every number with the checkpoint.

    Raises:
        ConfigError: the checkpoint does not fit the configuration. Or a number is not finite.
        StateError: a file of the checkpoint is damaged, or a verified tensor differs.
        CapacityError: the disk has no room.
    """
    files = RunDirectory(run_dir)
    skeleton = build_skeleton(load_run_config(run_dir), load_run_adapter(run_dir))
    trained = {
        each.name for block in files.table.blocks for each in block.tensors if each.trainable
    }
    state = open_checkpoint(source).fitted(skeleton, trained)
    model = files.config.model.path
    if skeleton.adapter is not None and model is not None:
        state = _with_base(state, open_checkpoint(model).fitted(skeleton, trained), trained)
    plan = plan_import(state, files.config, files.table, skeleton, options)
    fields = plan.to_fields()
    write_atomically(report, json.dumps(fields, indent=1))
    if plan.problems:
        shown = "; ".join(plan.problems[:_SHOWN_PROBLEMS])
        more = len(plan.problems) - _SHOWN_PROBLEMS
        raise ConfigError(shown + (f"; and {more} more problems" if more > 0 else ""))
    if into is None:
        return
    with writing(into, _num_bytes(plan, files.table.weight_dtype)):
        into.mkdir(parents=True)
        written = list(_write_blocks(plan, files.table.weight_dtype, into, verifies, say))
    write_atomically(report, json.dumps({**fields, "files": written}, indent=1))


def _with_base(state: ForeignState, model: ForeignState, trained: Collection[str]) -> ForeignState:
    """Returns the checkpoint of an adapter with the weights that its trainer left in the model's
    folder.
    """
    known = {each.name for each in state.tensors if each.role in (MASTER, WEIGHT)}
    lacking = [each for each in model.tensors if each.name not in known | set(trained)]
    if not lacking or known - set(trained):  # or the checkpoint has frozen weights of its own
        return state
    note = f"{model.path}: has the weights that are not trained"
    return replace(state, tensors=(*state.tensors, *lacking), notes=(*state.notes, note))


def _num_bytes(plan: ImportPlan, weight_dtype: DType) -> int:
    return sum(
        _type_of(each, weight_dtype).itemsize * each.spec.num_elements for each in plan.assignments
    )


def _type_of(each: Assignment, weight_dtype: DType) -> DType:
    return weight_dtype if each.array == FROZEN else DType.FP32


def _write_blocks(
    plan: ImportPlan, weight_dtype: DType, into: Path, verifies: bool, say: Say
) -> Iterator[dict[str, Any]]:
    """Writes a file for each block; yields name, bytes and SHA-256 of each."""
    blocks: dict[int, list[Assignment]] = {}
    for each in plan.assignments:
        blocks.setdefault(each.block, []).append(each)
    for number, (block, assignments) in enumerate(sorted(blocks.items()), start=1):
        path = into / f"block-{block:04d}.safetensors"
        digest, size = hashlib.sha256(), 0
        with path.open("xb") as file:
            for piece in _pieces_of_file(assignments, weight_dtype):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            _sync(file)
        if verifies:
            _verify(path, assignments, weight_dtype)
        say(f"block {number} of {len(blocks)}: {size / 1e6:,.1f} MB")
        yield {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def _pieces_of_file(assignments: Sequence[Assignment], weight_dtype: DType) -> Iterator[memoryview]:
    types = [_type_of(each, weight_dtype) for each in assignments]
    yield memoryview(
        file_header(
            (
                each.key,
                FILE_DTYPES[dtype],
                each.spec.shape,
                dtype.itemsize * each.spec.num_elements,
            )
            for each, dtype in zip(assignments, types, strict=True)
        )
    )
    for each in assignments:
        for values in _converted(each, weight_dtype):
            yield values.view(torch.uint8).numpy().data


def _converted(each: Assignment, weight_dtype: DType) -> Iterator[torch.Tensor]:
    """Yields the numbers of a tensor in the type of the run, in pieces.

    Raises:
        ConfigError: a number is not finite, or the run's weights cannot hold it.
        StateError: the file of the checkpoint is damaged.
    """
    source, count = each.source, each.spec.num_elements
    dtype = TORCH_DTYPES[_type_of(each, weight_dtype)]
    if source is None:
        for start in range(0, count, PIECE_ELEMENTS):
            yield torch.zeros(min(PIECE_ELEMENTS, count - start), dtype=dtype)
        return
    values = source.load()
    if values.numel() != count:
        raise StateError(
            f"{source.file}: {source.role} of {source.name} has {values.numel()} numbers, its"
            f" header has {source.num_elements}"
        )
    is_weight = each.array in (MASTER, FROZEN)
    computed = weight_dtype if is_weight else DType.FP32
    remedy = "" if is_weight else ", or give --weights-only"
    if computed is not DType.FP32:
        remedy = ", or set model.dtype to a wider type"
    flat = values.detach().reshape(-1)
    for start in range(0, count, PIECE_ELEMENTS):
        piece = flat[start : start + PIECE_ELEMENTS].to(dtype).contiguous()
        # In one pass: a NaN is both, and isfinite().all() takes 30 times as long.
        ends = torch.stack(piece.aminmax())
        if source.role in _SQUARES and ends[0] < 0:
            raise ConfigError(
                f"{source.file}: {source.role} of {source.name} has negative numbers, of which the"
                " optimizer takes roots; import an earlier checkpoint, or give --weights-only"
            )
        if not ends.to(TORCH_DTYPES[computed]).isfinite().all():
            raise ConfigError(
                f"{source.file}: {source.role} of {source.name} has numbers that are not finite, or"
                f" that {computed.value} cannot hold; import an earlier checkpoint{remedy}"
            )
        yield piece


def _verify(path: Path, assignments: Sequence[Assignment], weight_dtype: DType) -> None:
    """Compares a written file with the checkpoint.

    Raises:
        StateError: names the tensor that differs.
    """
    file = MappedFile(path)
    for each in assignments:
        written = file.tensor(each.key).reshape(-1)
        pieces = _converted(each, weight_dtype)
        for number, piece in enumerate(pieces):
            start = number * PIECE_ELEMENTS
            if not torch.equal(written[start : start + PIECE_ELEMENTS], piece):
                raise StateError(f"{path}: {each.key} differs from the checkpoint")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _say(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the import command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.exchange.importing", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("report", type=Path, help="JSON file to write")
    parser.add_argument("--into", type=Path, help="folder of the saved state; default: no files")
    parser.add_argument("--samples-seen", type=int)
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--verify", action="store_true", help="read the files back")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        model = RunDirectory(options.run_dir).config.model.path
        folders = [options.source, *([] if model is None else [model])]
        with Bounds(alone=options.parent_pid is not None).reading(*folders, copies=True):
            import_checkpoint(
                options.run_dir,
                options.source,
                options.report,
                ImportOptions(weights_only=options.weights_only, samples_seen=options.samples_seen),
                into=options.into,
                verifies=options.verify,
                say=_say,
            )

    return tool_main(work, options.report, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
