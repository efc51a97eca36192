"""Initial weights block by block: drawn by the model authors' method, or read from a directory.

Every block has its own random numbers, a function of (seed, block): any subset of blocks, in any
process, gets the same values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.models.adapters.modules import drawn
from penstock.models.adapters.settings import is_adapter_tensor
from penstock.models.binding import pack, unpack
from penstock.models.checkpoints.adapters import AdapterWeights
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.conversion import Weights
from penstock.models.checkpoints.files import chosen_files
from penstock.models.surgery.hf import folder_composite
from penstock.models.surgery.skeleton import Part, Skeleton, build_skeleton
from penstock.shm.table import BlockSpec, BlockTable

__all__ = ["initial_blocks", "pack", "unpack"]


def initial_blocks(
    config: Config,
    hf_config: PretrainedConfig,
    table: BlockTable,
    blocks: Sequence[int],
    files: Sequence[str] | None = None,
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yields each requested block with its tensors, one block at a time. Tensors are trainable and
    frozen ones, not borrowed ones, in fp32 and in the table's shapes, on the CPU.

    ``files`` are the files of ``model.path`` that the run was prepared with. The default is
    transformers' choice.

    Raises:
        ConfigError: the model cannot initialize a tensor, or the directory has no weights.
        StateError: a tensor of the directory is missing, damaged or of another shape. Or it has a
            number that is not finite, or not finite in the run's type.
    """
    skeleton = build_skeleton(hf_config)
    adapters = _adapters(config, hf_config, table)
    if config.model.path is None:
        for block in blocks:
            spec = table.blocks[block]
            yield block, _drawn(skeleton, spec, config.run.seed) | adapters(spec)
        return
    files = chosen_files(config.model.path, hf_config) if files is None else files
    composite = folder_composite(config.model.path)
    weights = Weights(skeleton, Checkpoint(config.model.path, files), composite)
    weights.check(table)
    for block in blocks:
        spec = table.blocks[block]
        yield block, weights.read(spec, table.weight_dtype) | adapters(spec)


def _adapters(
    config: Config, hf_config: PretrainedConfig, table: BlockTable
) -> Callable[[BlockSpec], dict[str, torch.Tensor]]:
    """Returns a function from a block to the tensors of its adapters: new ones, or those of
    ``adapter.path`` with its saved modules.
    """
    if config.adapter is not None and config.adapter.path is not None:
        adapter = build_skeleton(hf_config, config.adapter).adapter
        assert adapter is not None
        files = AdapterWeights(config.adapter.path, adapter)
        return lambda block: files.read(block, table.weight_dtype)
    return lambda block: {
        spec.name: drawn(spec.name, spec.shape, config.run.seed)
        for spec in block.tensors
        if is_adapter_tensor(spec.name)
    }


def _drawn(skeleton: Skeleton, block: BlockSpec, seed: int) -> dict[str, torch.Tensor]:
    part = skeleton.parts[block.index]
    names = {spec.name for spec in block.tensors}
    tensors: dict[str, torch.Tensor] = {}
    placeholders = []
    for name, (module, attribute) in part.tensors.items():
        if name in names:
            old = module._parameters[attribute]
            assert old is not None
            placeholders.append((module, attribute, old))
            # NaN marks numbers that the initialization does not set; checked below.
            tensors[name] = torch.full(old.shape, float("nan"))
            module._parameters[attribute] = nn.Parameter(tensors[name], requires_grad=False)
    digest = hashlib.blake2b(f"weights/{seed}/{block.index}".encode(), digest_size=8).digest()
    try:
        # Seeded for this block alone, and the process's generator goes on where it was. The models'
        # initialization draws on the CPU only, so no GPU's generator is touched.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            for root, owner in _roots(skeleton, part):
                _initialize(root, owner)
    finally:
        # The skeleton continues without memory for parameters: only the yielded block's lives.
        for module, attribute, old in placeholders:
            module._parameters[attribute] = old
    for name, value in tensors.items():
        if value.isnan().any():
            raise ConfigError(
                f"model: type {skeleton.model.config.model_type!r} does not say how to initialize"
                f" {name}; give its weights with model.path"
            )
    return tensors


def _roots(skeleton: Skeleton, part: Part) -> list[tuple[nn.Module, Any]]:
    """Returns the modules of a block, outermost ones only, with the model that initializes each."""
    model, decoder = skeleton.model, skeleton.decoder
    owner = decoder if hasattr(decoder, "_init_weights") else model
    if part.layer_index is not None:
        return [(skeleton.layers[part.layer_index], owner)]
    children = skeleton.around()
    if part is skeleton.parts[0]:
        return [(children[name], owner) for name in skeleton.before]
    top = skeleton.decoder_path.partition(".")[0]
    return [
        *((children[name], owner) for name in skeleton.after),
        *((child, model) for name, child in model.named_children() if name != top),
    ]


def _initialize(module: nn.Module, owner: Any) -> None:
    """Initializes children first, as transformers does: a parent may scale the numbers that its
    children drew (GPT-2).
    """
    for child in module.children():
        _initialize(child, owner)
    owner._init_weights(module)
