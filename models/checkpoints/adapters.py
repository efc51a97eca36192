"""adapter_model.safetensors of PEFT: the tensors of an adapter in and out.

In the file, a tensor of an adapter has the name of a run's table behind a prefix. So do the
parameters of ``modules_to_save``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from penstock.config.schema import Config
from penstock.host.errors import ConfigError, StateError
from penstock.models.adapters.files import WEIGHTS
from penstock.models.adapters.settings import Adapter
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.conversion import Weights
from penstock.models.checkpoints.files import few
from penstock.models.surgery.skeleton import Skeleton
from penstock.shm.table import BlockSpec, BlockTable, DType, TensorSpec

PREFIX = "base_model.model."
_BASE = ".base_layer."
"""Part of the names of base weights, which PEFT saves with adapters of embeddings."""

_OF_ADAPTER = re.compile(
    r"(?<=\.lora_[AB])\.default(?=\.weight$)|(?<=\.lora_embedding_[AB])\.default$"
    r"|\.modules_to_save\.default(?=\.)"
)
"""The adapter's name in names of a model in memory. PEFT reads files with it, and saves without."""


class AdapterWeights:
    """The tensors of an adapter's folder for a run with the modules ``adapter``."""

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        """Reads the names and shapes.

        Raises:
            StateError: the file is missing or damaged, or has a tensor under two names.
        """
        self._path, self._adapter = folder / WEIGHTS, adapter
        self._checkpoint = Checkpoint(folder, [WEIGHTS])
        self._names: dict[str, str] = {}
        """Names of tensors in the file by those that PEFT saves."""
        for name in self._checkpoint.headers:
            other = self._names.setdefault(_saved_name(name), name)
            if other != name:
                raise StateError(f"{self._path}: {other} and {name} are one tensor; keep one")

    def check(self, table: BlockTable, constants: frozenset[str] = frozenset()) -> None:
        """Compares names, shapes and types with the table's. ``constants`` are the names of the
        model's persistent buffers.

        Raises:
            ConfigError: the file has tensors that the run has no place for.
            StateError: tensors are missing, or of another shape or type.
        """
        specs = {spec.name: spec for block in table.blocks for spec in block.tensors}
        headers = self._checkpoint.headers
        lacking = [n for n in specs if self._adapter.trains(n) and PREFIX + n not in self._names]
        if lacking:
            raise StateError(
                f"{self._path}: lacks {len(lacking)} of the adapter's tensors: {few(lacking)};"
                " the file and adapter_config.json must be of one adapter and of this model."
                f" Names in the file: {few(list(headers)) or 'none'}"
            )
        unknown = [name for name in headers if not self._has_place(name, specs, constants)]
        if unknown:
            raise ConfigError(
                f"{self._path}: has {len(unknown)} tensors that the run has no place for:"
                f" {few(unknown)}; adapter_config.json names no such module; or PEFT saved a"
                " resized embedding (resize_token_embeddings): give the model with that embedding"
                " as model.path, and list the module in modules_to_save"
            )
        for name, header in headers.items():
            spec = specs.get(plain_name(name))
            if spec is not None and header.shape != spec.shape:
                raise StateError(
                    f"{self._path}: {name} has shape {header.shape}, the model and"
                    f" adapter_config.json ask for {spec.shape}"
                )
            if spec is not None:
                self._checkpoint.check_type(name)

    def read(self, block: BlockSpec, dtype: DType) -> dict[str, torch.Tensor]:
        """Returns the tensors of a block by their names in the table, in fp32. ``dtype`` is the
        type that the run stores.

        Raises:
            StateError: the file is damaged, or has a number that is not finite, or not in
                ``dtype``.
        """
        return {
            spec.name: self._checkpoint.read(self._names[PREFIX + spec.name], dtype)
            for spec in block.tensors
            if self._adapter.trains(spec.name)
        }

    def has_base_of(self, block: BlockSpec) -> bool:
        """Returns whether the file has a base weight of a block, too."""
        bases = {plain_name(name) for name in self._checkpoint.headers if _BASE in name}
        return any(spec.name in bases for spec in block.tensors)

    def check_base(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compares base weights that the file has, too, with those of the model.

        Raises:
            ConfigError: a weight differs: the adapter belongs to another model.
        """
        for name in self._checkpoint.headers:
            value = tensors.get(plain_name(name))
            if _BASE in name and value is not None and not self._is_same(name, value):
                raise ConfigError(
                    f"{self._path}: {name} is not the weight {plain_name(name)} of model.path; the"
                    " adapter belongs to another model, or the embedding was changed"
                )

    def _is_same(self, name: str, value: torch.Tensor) -> bool:
        """Returns whether a copy is a weight, perhaps rounded when PEFT loaded the model."""
        copy = self._checkpoint.read_as_is(name)
        kinds = {copy.dtype, torch.bfloat16, torch.float16}
        whole = copy.to(torch.float32)
        return any(torch.equal(value.to(kind).to(torch.float32), whole) for kind in kinds)

    def _has_place(
        self, name: str, specs: Mapping[str, TensorSpec], constants: frozenset[str]
    ) -> bool:
        if not name.startswith(PREFIX):
            return False
        plain = plain_name(name)
        if _BASE in name:
            return plain.rpartition(".")[0] in self._adapter.modules
        return self._adapter.trains(plain) and (plain in specs or plain in constants)


def check_adapter_files(
    config: Config, skeleton: Skeleton, table: BlockTable, weights: Weights | None
) -> None:
    """Compares the files of ``adapter.path``, if any, with the model that gets the adapter.
    ``weights`` are those of ``model.path``.

    Raises:
        ConfigError, StateError: the files do not fit; see :class:`AdapterWeights`.
    """
    given = config.adapter
    if given is None or given.path is None:
        return
    assert skeleton.adapter is not None
    files = AdapterWeights(given.path, skeleton.adapter)
    files.check(table, frozenset(skeleton.constants()))
    for block in table.blocks:
        if weights is not None and files.has_base_of(block):
            files.check_base(weights.read(block, table.weight_dtype))
    for block in table.blocks:
        files.read(block, table.weight_dtype)  # refuses numbers before the run takes memory


def adapter_tensors(
    tensors: Mapping[str, torch.Tensor], adapter: Adapter, dtype: DType
) -> dict[str, torch.Tensor]:
    """Returns the trained tensors among those of a block as a file of PEFT has them."""
    return {
        PREFIX + name: value.to(TORCH_DTYPES[dtype]).contiguous()
        for name, value in tensors.items()
        if adapter.trains(name)
    }


def merged(
    name: str, tensors: Mapping[str, torch.Tensor], adapter: Adapter, model: nn.Module
) -> torch.Tensor:
    """Returns a tensor of a model; a weight with its module's adapter added in fp32.

    The arithmetic and its order are those of PEFT's ``merge_and_unload`` in fp32: the product B A,
    then the factor, then the sum.
    """
    path, _, attribute = name.rpartition(".")
    adapted = adapter.modules.get(path)
    if adapted is None or attribute != "weight":
        return tensors[name]
    module = model.get_submodule(path)
    ends = ("lora_A.weight", "lora_B.weight")
    if isinstance(module, nn.Embedding):
        ends = ("lora_embedding_A", "lora_embedding_B")
    down, up = (tensors[f"{path}.{end}"].to(torch.float32) for end in ends)
    change = up @ down
    if not isinstance(module, nn.Linear):
        change = change.T  # weights of embeddings and of Conv1D are (inputs, outputs)
    return tensors[name].to(torch.float32) + change * adapted.scale


def plain_name(name: str) -> str:
    """Returns the name that a tensor of the file has in the model."""
    return _saved_name(name).removeprefix(PREFIX).replace(_BASE, ".")


def _saved_name(name: str) -> str:
    """Returns the name that PEFT saves for a tensor of the file."""
    return _OF_ADAPTER.sub("", name)
