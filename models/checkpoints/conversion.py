"""Between the tensors that files have and those that a model has, as transformers converts them.

Published files often name and cut tensors in another way than the modules do: one tensor for each
expert, say, where the module has all experts in one. transformers knows how to get from one to the
other for each type of model, and back; this module applies that to a few tensors at a time, and
first to headers alone, which tells in seconds whether a directory has what a model needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from penstock.models.checkpoints.checkpoint import Checkpoint, Header
from penstock.models.surgery.skeleton import Skeleton
from penstock.protocol.errors import StateError, reason
from penstock.shm.table import BlockSpec, BlockTable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """Tensors of the files that together become one or several of the model.

    ``target`` is the (first) tensor that they become; ``sources`` are pairs of a pattern of
    ``transform`` and the name that it matched, in the order in which transformers collects them.
    """

    target: str
    transform: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    def apply(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the model's tensors by name. ``read`` gives a tensor of the files, of its
        shape there.
        """
        # Transforms keep what they collect: each use takes one of its own.
        transform = copy.deepcopy(self.transform)
        for pattern, name in self.sources:
            transform.add_tensor(self.target, name, pattern, read(name))
        converted: dict[str, Any] = transform.convert(self.target, model=model, config=model.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in converted.items()}


class Weights:
    """The tensors of a model, found in a directory."""

    def __init__(self, skeleton: Skeleton, checkpoint: Checkpoint) -> None:
        """Work out which of the model's tensors come from which of the files', from headers alone.

        Raises:
            StateError: some cannot be converted.
        """
        self._model, self._checkpoint = skeleton.model, checkpoint
        self._aliases = skeleton.tied_names()
        self._recipe_of: dict[str, _Recipe] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for recipe in _recipes(self._model, checkpoint.headers):
            try:
                made = recipe.apply(self._model, lambda n: _placeholder(checkpoint.headers[n]))
            except Exception as error:  # operations of transformers and torch raise any kind
                names = ", ".join(name for _, name in recipe.sources[:3])
                raise StateError(
                    f"model.path: {names}, … cannot be converted to {recipe.target}:"
                    f" {reason(error)}"
                ) from error
            for name, value in made.items():
                self._recipe_of[name] = recipe
                self._shapes[name] = tuple(value.shape)

    def check(self, table: BlockTable) -> None:
        """Hold all that a model needs against what there is.

        Raises:
            StateError: a tensor is missing, or of another shape or type.
        """
        for block in table.blocks:
            for spec in block.tensors:
                name = self._find(spec.name, block)
                if self._shapes[name] != spec.shape:
                    raise StateError(
                        f"model.path: {name} has shape {self._shapes[name]} in the files, the"
                        f" model's configuration asks for {spec.shape}"
                    )
                for _, source in self._recipe_of[name].sources:
                    self._checkpoint.check_type(source)

    def read(self, block: BlockSpec) -> dict[str, torch.Tensor]:
        """Returns the own tensors of a block by name, in fp32 and in the table's shapes; each is
        read from the files once.

        Raises:
            StateError: a tensor is missing, or its file is damaged.
        """
        made: dict[str, torch.Tensor] = {}
        tensors = {}
        for spec in block.tensors:
            name = self._find(spec.name, block)
            if name not in made:
                made |= self._recipe_of[name].apply(self._model, self._checkpoint.read)
            tensors[spec.name] = made.pop(name)
        return tensors

    def _find(self, name: str, block: BlockSpec) -> str:
        """Returns the name under which the files have a tensor; a tied one may go by any of its
        names.
        """
        for alias in self._aliases.get(name, [name]):
            if alias in self._recipe_of:
                return alias
        raise StateError(f"model.path: the files have no tensor {name} ({block.name})")


def as_published(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of some blocks under the names and in the shapes that published files have.

    ``model`` is the skeleton's. ``tensors`` have the model's names and shapes, and keep their
    dtype; those that become one belong to one block. The inverse of :meth:`Weights.read`, by
    transformers' own conversion.
    """
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return {name: value.contiguous() for name, value in converted.items()}


def _recipes(model: Any, names: Iterable[str]) -> Iterable[_Recipe]:
    """Group names of files by what they become; names that the model has no use for are left out.

    The order matters to transformers: where it stacks tensors, and to renamings that wait for each
    other.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    recipes: dict[str, _Recipe] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            # The files name it as the model does already.
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            continue
        if pattern is None:
            renaming = WeightRenaming(name, target)
            recipes.setdefault(
                target, _Recipe(target=target, transform=renaming, sources=[(name, name)])
            )
            continue
        recipe = recipes.setdefault(target, _Recipe(target=target, transform=converter_of[pattern]))
        recipe.sources.append((pattern, name))
    return recipes.values()


def _placeholder(header: Header) -> torch.Tensor:
    """Returns a fp32 tensor that has the shape and no memory."""
    return torch.empty(header.shape, dtype=torch.float32, device="meta")
