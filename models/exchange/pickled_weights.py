"""Weights of a model in pickles: ``pytorch_model.bin`` of older versions of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.host.errors import StateError
from penstock.host.files import DAMAGED, is_file, parse_json
from penstock.models.checkpoints.checkpoint import Checkpoint, Header
from penstock.models.checkpoints.mapped import TYPES
from penstock.models.exchange.pickles import PickledTensor, expect_items, load_torch

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of the weights, and of the list of their files; the first that exists counts."""
_NAMES = {dtype: name for name, dtype in TYPES.items()}


class PickledWeights(Checkpoint):
    """The tensors of some pickles by name."""

    def __init__(self, directory: Path, files: Sequence[str]) -> None:
        """Reads the pickles without the numbers.

        Raises:
            StateError: a file is missing or damaged.
        """
        self._pickled: dict[tuple[str, str], PickledTensor] = {}
        super().__init__(directory, files)

    def _raw(self, name: str, file_name: str) -> torch.Tensor:
        return self._pickled[file_name, name].load()

    def _read_headers(self, file_name: str) -> dict[str, Header]:
        path = self._directory / file_name
        if not is_file(path):
            raise StateError(f"{path}: is missing")
        tensors = expect_items(load_torch(path), PickledTensor, path, "the weights")
        self._pickled |= {(file_name, name): tensor for name, tensor in tensors.items()}
        return {
            name: Header(file_name=file_name, dtype=_NAMES[tensor.dtype], shape=tensor.shape)
            for name, tensor in tensors.items()
        }


def pickled_files(directory: Path, name: str) -> list[str]:
    """Returns the files with the weights, by ``name``, one of :data:`PICKLED`.

    Raises:
        StateError: the list of the files is damaged.
    """
    if name == PICKLED[0]:
        return [name]
    path = directory / name
    try:
        listed = parse_json(path.read_bytes())["weight_map"].values()
        files = sorted({str(each) for each in listed})
    except (OSError, *DAMAGED) as error:
        raise StateError(f"{path}: is damaged: {error!r}") from error
    if strange := [each for each in files if "/" in each or each in (".", "..")]:
        raise StateError(f"{path}: names files outside of the folder, such as {strange[0]!r}")
    return files
