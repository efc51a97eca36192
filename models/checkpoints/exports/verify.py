"""Verification of an export: the written files are read back, and every tensor is compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.host.errors import StateError
from penstock.models.adapters.settings import Adapter
from penstock.models.checkpoints.adapters import PREFIX, AdapterWeights
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.conversion import Weights
from penstock.models.checkpoints.exports.tensors import ExportedTensors
from penstock.models.checkpoints.files import chosen_files
from penstock.shm.table import BlockTable, DType


def verify_model(source: ExportedTensors, folder: Path) -> None:
    """Reads a folder of transformers as a run does that starts in it, and compares every tensor
    and constant with those of the saved state.

    Raises:
        StateError: a tensor is missing, or differs.
    """
    checkpoint = Checkpoint(folder, chosen_files(folder, source.hf_config))
    weights = Weights(source.skeleton, checkpoint)
    for block in source.blocks:
        expected = source.typed(block.index)
        actual = weights.read(block, DType.FP32)
        for name in expected.keys() - actual.keys():
            constant = weights.read_constant(name, tuple(expected[name].shape))
            if constant is not None:
                actual[name] = constant
        _compare(expected, actual, folder)


def verify_adapter(
    tensors: Mapping[str, torch.Tensor], adapter: Adapter, table: BlockTable, folder: Path
) -> None:
    """Reads the files of an adapter as a run does that starts with it, and compares every tensor.
    ``tensors`` are those of the saved state by their names in the file.

    Raises:
        StateError: a tensor is missing, or differs.
    """
    files = AdapterWeights(folder, adapter)
    files.check(table, frozenset(name.removeprefix(PREFIX) for name in tensors))
    for block in table.blocks:
        actual = files.read(block, DType.FP32)
        expected = {name: tensors[PREFIX + name] for name in actual}
        _compare(expected, actual, folder)


def _compare(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], folder: Path
) -> None:
    for name, value in expected.items():
        written = actual.get(name)
        if written is None or not torch.equal(value.to(written.dtype), written):
            fault = "is missing in" if written is None else "differs from the saved state in"
            raise StateError(f"--verify: {name} {fault} {folder}; the export is not kept")
