"""The tensors of a saved state as published files have them, block by block.

Adapters are merged into the weights of their modules. A weight that is tied to others and has an
adapter is untied: the adapter changes the weight in one module alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import PretrainedConfig

from penstock.config.adapter import AdapterConfig
from penstock.host.errors import ConfigError, StateError
from penstock.models.adapters.settings import Adapter, is_adapter_tensor
from penstock.models.binding import TORCH_DTYPES
from penstock.models.checkpoints.adapters import merged
from penstock.models.checkpoints.constants import Constants
from penstock.models.checkpoints.conversion import as_published
from penstock.models.checkpoints.mapped import MappedFile
from penstock.models.surgery.skeleton import Skeleton, build_skeleton, loaded_dtypes
from penstock.protocol.run.checksums import CONSTANTS
from penstock.protocol.run.saved_base import base_paths
from penstock.shm.table import BlockSpec, BlockTable, DType

ReadBlock = Callable[[int], Mapping[str, NDArray[Any]]]
"""Block -> its own tensors by name: fp32, fp16, or bf16 as uint16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensors:
    """The tensors of a table's blocks and their constants, with the adapters merged.

    ``hf_config`` is that of the export. ``dtypes`` maps a name in the model to the written type.
    ``untied``: the export has a tensor for each name of a tied one.
    """

    hf_config: PretrainedConfig
    skeleton: Skeleton
    table: BlockTable
    read_block: ReadBlock
    dtypes: Mapping[str, torch.dtype]
    constants: Constants
    adapter: Adapter | None
    untied: bool

    @classmethod
    def of(
        cls,
        hf_config: PretrainedConfig,
        table: BlockTable,
        read_block: ReadBlock,
        *,
        dtype: DType,
        constants: Constants,
        adapter: AdapterConfig | None = None,
    ) -> ExportedTensors:
        """Returns the tensors of a run with the model ``hf_config`` and the adapters ``adapter``.

        Raises:
            ConfigError: a tied weight has an adapter, and transformers cannot untie the weight.
        """
        adapters = None if adapter is None else build_skeleton(hf_config, adapter).adapter
        skeleton, untied = build_skeleton(hf_config), False
        if adapters is not None and _has_tied(skeleton, adapters):
            hf_config, untied = copy.deepcopy(hf_config), True
            hf_config.tie_word_embeddings = False
            skeleton = build_skeleton(hf_config)
            if _has_tied(skeleton, adapters):
                raise ConfigError(
                    f"--format hf: models of type {hf_config.model_type!r} always tie a weight that"
                    " has an adapter here; give --format peft"
                )
        return cls(
            hf_config=hf_config,
            skeleton=skeleton,
            table=table,
            read_block=read_block,
            dtypes=loaded_dtypes(hf_config, TORCH_DTYPES[dtype]),
            constants=constants,
            adapter=adapters,
            untied=untied,
        )

    @property
    def blocks(self) -> list[BlockSpec]:
        """The blocks that have tensors in the export, without those of adapters."""
        blocks = []
        for block in self.table.blocks:
            specs = [spec for spec in block.tensors if not is_adapter_tensor(spec.name)]
            if self.untied:
                owners = self.table.blocks
                specs += [
                    replace(spec, name=borrowed.local_name)
                    for borrowed in block.borrows
                    for spec in owners[borrowed.owner].tensors
                    if spec.name == borrowed.name
                ]
            if specs:
                blocks.append(replace(block, tensors=tuple(specs)))
        return blocks

    def tensors(self, block: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of one block as published files have them.

        Raises:
            ConfigError, StateError: see :meth:`typed`.
        """
        return as_published(self.skeleton.model, self.typed(block))

    def typed(self, block: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of one block by their names in the model, in the written types.

        Raises:
            ConfigError: the written type cannot hold a number.
            StateError: see :meth:`named`.
        """
        return {name: self.written(name, value) for name, value in self.named(block).items()}

    def written(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in its written type, by its name in the model.

        Raises:
            ConfigError: the type cannot hold a number.
        """
        # Rounds to nearest even where the type is narrower than the master weights' fp32.
        typed = value.to(self.dtypes[name])
        if typed.dtype is torch.float16 and typed.isinf().any():
            raise ConfigError(
                f"--dtype fp16: {name} has numbers that fp16 cannot hold; give bf16 or fp32"
            )
        return typed

    def named(self, block: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of one block by their names in the model, with its adapters merged.

        Raises:
            StateError: the block or the constants lack a tensor, or a shape differs from the
                table's.
        """
        tensors = self.saved(block)
        if self.untied:
            for borrowed in self.table.blocks[block].borrows:
                tensors[borrowed.local_name] = self.saved(borrowed.owner)[borrowed.name]
        if self.adapter is None:
            return tensors
        return {
            name: merged(name, tensors, self.adapter, self.skeleton.model)
            for name in tensors
            if not is_adapter_tensor(name)
        }

    def saved(self, block: int) -> dict[str, torch.Tensor]:
        """Returns the tensors of one block as the state has them, those of adapters among them.

        Raises:
            StateError: as :meth:`named`.
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


def saved_tensors(path: Path, keys: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields keys of a file of a saved state with their tensors, over the mapped file.

    Raises:
        StateError: the file is damaged or missing, or lacks a key.
    """
    try:
        file = MappedFile(path)
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: {error}") from error
    for key in keys:
        if key not in file.entries:
            raise StateError(f"{path}: has no tensor {key}")
        yield key, file.tensor(key)


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
            for key, tensor in saved_tensors(source, keys):
                arrays[keys[key]] = tensor.to(torch.float32).numpy()
        return arrays

    return read_block


def _has_tied(skeleton: Skeleton, adapter: Adapter) -> bool:
    """Returns whether a weight with an adapter has several names."""
    return any(
        len(names) > 1 and any(name.rpartition(".")[0] in adapter.modules for name in names)
        for names in skeleton.tied_names().values()
    )
