"""Conversion between tensors of files and tensors of a model, by the rules of transformers.

Published files often name and cut tensors differently from the modules, such as one tensor for each
expert instead of one for all. Transformers knows the conversion for each type of model, in both
directions. This module applies the conversion to a few tensors at a time. A first pass over headers
alone shows in seconds whether a directory has all tensors of a model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from penstock.host.errors import StateError, reason
from penstock.models.adapters.settings import is_adapter_tensor
from penstock.models.checkpoints.checkpoint import Checkpoint, Header
from penstock.models.checkpoints.files import few
from penstock.models.surgery.composite import Composite
from penstock.models.surgery.skeleton import Skeleton
from penstock.shm.table import BlockSpec, BlockTable, DType

_FIRST_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


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
        # Transforms keep collected tensors: each use takes a copy.
        transform = copy.deepcopy(self.transform)
        for pattern, name in self.sources:
            transform.add_tensor(self.target, name, pattern, read(name))
        converted: dict[str, Any] = transform.convert(self.target, model=model, config=model.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in converted.items()}


class Weights:
    """The tensors of a model, found in a directory."""

    def __init__(
        self, skeleton: Skeleton, checkpoint: Checkpoint, composite: Composite | None = None
    ) -> None:
        """Maps the model's tensors to those of the files, from headers alone.

        ``composite`` is the whole model if ``skeleton`` is the text model of a larger one.

        Raises:
            StateError: a tensor cannot be converted.
        """
        self._model = skeleton.model if composite is None else composite.model
        self._trained = skeleton.model
        self._checkpoint, self._composite = checkpoint, composite
        self._aliases, self._ties = all_names(skeleton), skeleton.model.all_tied_weights_keys
        self._recipe_of: dict[str, _Recipe] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.left_out: list[str] = []
        """Tensors of the whole model's other parts, under the files' names."""
        model_tensors = self._trained.state_dict()
        used: set[str] = set()
        for recipe in _recipes(self._model, checkpoint.headers):
            try:
                made = self._apply(recipe, lambda n: _placeholder(checkpoint.headers[n]))
            except Exception as error:  # operations of transformers and torch raise any kind
                names = ", ".join(name for _, name in recipe.sources[:3])
                raise StateError(
                    f"model.path: {names}, … cannot be converted to {recipe.target}:"
                    f" {reason(error)}"
                ) from error
            sources = [name for _, name in recipe.sources]
            used.update(sources)
            if composite is not None and not made.keys() & model_tensors.keys():
                self.left_out += sources
            for name, value in made.items():
                self._recipe_of[name] = recipe
                self._shapes[name] = tuple(value.shape)
        ignored = _ignored(self._model)
        self.unused = [
            name for name in checkpoint.headers if name not in used and not ignored(name)
        ]
        """Names of tensors of the files that the model does not use, without those that
        transformers ignores silently, too.
        """

    def _apply(
        self, recipe: _Recipe, read: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the tensors that a recipe makes, by their names in the trained model."""
        made = recipe.apply(self._model, read)
        if self._composite is None:
            return made
        return {self._composite.text_name(name): value for name, value in made.items()}

    def sources_of(self, name: str) -> list[str]:
        """Returns the names of the files' tensors that become a tensor of the model, under all
        names of a tied one.
        """
        names = [alias for alias in self._aliases.get(name, [name]) if alias in self._recipe_of]
        return [source for alias in names for _, source in self._recipe_of[alias].sources]

    def described(self) -> Iterator[tuple[str, tuple[int, ...], list[str]]]:
        """Yields each tensor of the trained model that the files have, under each of its names.
        Shape and the names of its tensors in the files follow.
        """
        model_tensors = self._trained.state_dict()
        for name, recipe in self._recipe_of.items():
            if name in model_tensors:
                yield name, self._shapes[name], [source for _, source in recipe.sources]

    def load(self, name: str) -> torch.Tensor:
        """Returns a tensor of :meth:`described` in the type of the files, perhaps over a mapped
        file.

        Raises:
            StateError: the file is damaged.
        """
        return self._apply(self._recipe_of[name], self._checkpoint.view)[name]

    def published(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns tensors of one block under the names and in the shapes of the files.

        Raises:
            StateError: transformers cannot convert a tensor back to the form of the files.
        """
        made: dict[str, torch.Tensor] = {}
        converted: dict[str, torch.Tensor] = {}
        targets: set[str] = set()
        for name, value in tensors.items():
            for alias in (a for a in self._aliases.get(name, [name]) if a in self._recipe_of):
                recipe = self._recipe_of[alias]
                if isinstance(recipe.transform, WeightRenaming):
                    made[recipe.sources[0][1]] = value
                else:
                    whole = alias if self._composite is None else self._composite.whole_name(alias)
                    converted[whole] = value
                    targets.update(source for _, source in recipe.sources)
        if converted:
            made |= as_published(self._model, converted)
        if lacking := targets - made.keys():
            raise StateError(
                f"model.path: {few(sorted(lacking))} cannot be made from the run's tensors"
            )
        return made

    def differing(self) -> list[tuple[str, str]]:
        """Returns the name pairs of tied tensors that are both in the files, with different numbers
        or shapes.

        Raises:
            StateError: a file is damaged.
        """
        return [pair for pair in self._tied_pairs() if not self._equal(*pair)]

    def untied(self) -> bool:
        """Returns whether transformers would not apply the configuration's ties, because the files
        have both tensors, with different numbers.

        Raises:
            StateError: a file is damaged, or only some of several ties hold.
        """
        differing = self.differing()
        if not differing:
            return False
        ties = {frozenset(pair) for pair in self._ties.items()}
        kept = ties - {frozenset(pair) for pair in differing}
        if kept or not ties:
            target, source = differing[0]
            others = f" and {' and '.join(sorted(min(kept, key=sorted)))} do not" if kept else ""
            raise StateError(
                f"model.path: {source} and {target}, which are one tensor of the model, differ in"
                f" the files{others}; set tie_word_embeddings to false in config.json, or remove"
                f" {target} from the files"
            )
        return True

    def missing(self, table: BlockTable) -> dict[str, str]:
        """Returns the tensors that the files do not have: name -> block."""
        return {
            spec.name: block.name
            for block in table.blocks
            for spec in block.tensors
            if not is_adapter_tensor(spec.name) and self._find(spec.name) is None
        }

    def check(self, table: BlockTable) -> None:
        """Compares the model's tensors with those of the files.

        Raises:
            StateError: tensors are missing, or one is of another shape or type.
        """
        missing = self.missing(table)
        if missing:
            raise self._missing(missing)
        for spec in (spec for block in table.blocks for spec in block.tensors):
            if is_adapter_tensor(spec.name):
                continue
            name = self._find(spec.name)
            assert name is not None
            if self._shapes[name] != spec.shape:
                raise StateError(
                    f"model.path: {name} has shape {self._shapes[name]} in the files, the"
                    f" model's configuration asks for {spec.shape}"
                )
            for _, source in self._recipe_of[name].sources:
                self._checkpoint.check_type(source)

    def read(self, block: BlockSpec, dtype: DType) -> dict[str, torch.Tensor]:
        """Returns the own tensors of a block by name, in fp32 and in the table's shapes; each is
        read from the files once. Those of adapters are left out. ``dtype`` is the type that the run
        stores.

        Raises:
            StateError: a tensor is missing, or its file is damaged, or it has a number that is not
                finite or not in ``dtype``.
        """
        made: dict[str, torch.Tensor] = {}
        tensors = {}
        for spec in block.tensors:
            if is_adapter_tensor(spec.name):
                continue
            name = self._find(spec.name)
            if name is None:
                raise self._missing({spec.name: block.name})
            if name not in made:
                made |= self._apply(
                    self._recipe_of[name], lambda source: self._checkpoint.read(source, dtype)
                )
            tensors[spec.name] = made.pop(name)
        return tensors

    def read_constant(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Returns a buffer of the model in the type that the files have; None where they have none,
        as older ones do.

        Raises:
            StateError: its file is damaged, or it has another shape.
        """
        if name not in self._recipe_of:
            return None
        if self._shapes[name] != shape:
            raise StateError(
                f"model.path: {name} has shape {self._shapes[name]} in the files, the model's"
                f" configuration asks for {shape}"
            )
        return self._apply(self._recipe_of[name], self._checkpoint.read_as_is)[name]

    def _find(self, name: str) -> str | None:
        """Returns the name of a tensor in the files; a tied one may have any of its names there.
        None: the files lack it.
        """
        return next((a for a in self._aliases.get(name, [name]) if a in self._recipe_of), None)

    def _missing(self, block_of: Mapping[str, str]) -> StateError:
        if len(block_of) == 1:
            ((name, block),) = block_of.items()
            message = f"model.path: the files have no tensor {name} ({block})"
        else:
            message = (
                f"model.path: the files lack {len(block_of)} tensors of the model:"
                f" {', '.join(folded(block_of))}"
            )
        if self.unused:
            names = few(folded(self.unused))
            message += f"; they have {len(self.unused)} others that it has no use for ({names})"
        return StateError(message)

    def _tied_pairs(self) -> Iterator[tuple[str, str]]:
        """Yields the names of tied tensors of which the files have both: target, source."""
        for names in self._aliases.values():
            present = [name for name in names if name in self._recipe_of]
            for other in present[1:]:
                yield other, present[0]

    def _equal(self, one: str, other: str) -> bool:
        recipes = [self._recipe_of[name] for name in (one, other)]
        if all(isinstance(recipe.transform, WeightRenaming) for recipe in recipes):
            sources = [recipe.sources[0][1] for recipe in recipes]
            return self._checkpoint.equal(*sources)
        made = [self._apply(recipe, self._checkpoint.read) for recipe in recipes]
        return torch.equal(made[0][one], made[1][other])


def all_names(skeleton: Skeleton) -> dict[str, list[str]]:
    """Returns all names of each parameter, by its first name in block order, which is also first in
    the list.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in skeleton.model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    aliases = {}
    for owner, names in skeleton.tied_names().items():
        every = names_of[id(skeleton.model.get_parameter(owner))]
        aliases[owner] = [*names, *(name for name in every if name not in names)]
    return aliases


def folded(names: Iterable[str]) -> list[str]:
    """Returns names without repetition. Names that differ in the first number alone, such as those
    of layers, become one: ``layers.2-5.mlp.bias``.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        number = _FIRST_NUMBER.search(name)
        key = (name, "") if number is None else (name[: number.start()], name[number.end() :])
        numbers.setdefault(key, []).extend([] if number is None else [int(number.group())])
    return [f"{start}{_ranges(sorted(of))}{end}" for (start, end), of in numbers.items()]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _ignored(model: Any) -> Callable[[str], bool]:
    """Returns the names that transformers does not report as unexpected: buffers that older
    versions saved, and names that a type of model declares.
    """
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def as_published(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of some blocks under the names and in the shapes that published files have.

    ``model`` is the skeleton's. ``tensors`` have the model's names and shapes, and keep their
    dtype; those that become one belong to one block. The inverse of :meth:`Weights.read`, by
    transformers' own conversion.
    """
    return {name: value.contiguous() for name, value in published_views(model, tensors).items()}


def published_views(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of :func:`as_published` as views, where transformers makes views."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _recipes(model: Any, names: Iterable[str]) -> Iterable[_Recipe]:
    """Groups names of files by the tensor that they become, without names that the model does not
    use.

    The order matters to transformers: for stacked tensors, and for renamings that depend on each
    other.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    model_tensors, prefix = model.state_dict(), model.base_model_prefix
    recipes: dict[str, _Recipe] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, model_tensors)
        if target not in model_tensors and name in model_tensors:
            # The files name it as the model does already.
            target, pattern = rename_source_key(name, [], [], prefix, model_tensors)
        if target not in model_tensors:
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
    """Returns a fp32 tensor with the shape and without memory."""
    return torch.empty(header.shape, dtype=torch.float32, device="meta")
