"""Parts of both forms of DeepSpeed's checkpoints: names, groups, and frozen parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.host.errors import StateError
from penstock.host.files import is_file
from penstock.models.adapters.files import SETTINGS, WEIGHTS
from penstock.models.adapters.settings import is_adapter_tensor
from penstock.models.checkpoints.adapters import PREFIX
from penstock.models.exchange.folders import fitted_adapter
from penstock.models.exchange.foreign import (
    WEIGHT,
    ForeignGroup,
    ForeignState,
    ForeignTensor,
    group_of,
)
from penstock.models.exchange.pickles import (
    PickledTensor,
    expect,
    expect_items,
    expect_list,
    load_torch,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Arrays of Adam's state, in DeepSpeed's and in our names."""

_WRAPPERS = re.compile(r"^(?:module\.)+|_orig_mod\.")
_OF_PEFT = re.compile(
    r"\.(?:base_layer|original_module|modules_to_save\.default)(?=\.)|(?<=_[AB])\.default(?=\.|$)"
)
"""Parts of names that PEFT adds to those of its files."""


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of wrappers, and as PEFT's files have it."""
    name = _WRAPPERS.sub("", name)
    return _OF_PEFT.sub("", name.removeprefix(PREFIX)) if name.startswith(PREFIX) else name


def compared_with_adapter(state: ForeignState) -> ForeignState:
    """Returns the checkpoint. If PEFT's files lie in its folder or the one above, an import
    compares their settings with the run's adapter.
    """
    if not any(is_adapter_tensor(tensor.name) for tensor in state.tensors):
        return state
    folders = [
        folder
        for folder in (state.path, state.path.parent)
        if is_file(folder / SETTINGS) and is_file(folder / WEIGHTS)
    ]
    if folders:
        return replace(state, fit=lambda skeleton, _: fitted_adapter(state, folders[0], skeleton))
    note = (
        f"{state.path}: has no folder of PEFT with {SETTINGS} and {WEIGHTS}, so alpha and modules"
        " are those of the configuration"
    )
    return replace(state, notes=(*state.notes, note))


def tagged(path: Path, file: str) -> Path:
    """Returns the folder of the tag that ``path/file`` names, or ``path`` without such a file.

    Raises:
        StateError: the file names no folder in ``path``.
    """
    listed = path / file
    if not listed.is_file():
        return path
    tag = listed.read_bytes()[:4096].decode(errors="replace").strip()
    if not tag or Path(tag).name != tag or not (path / tag).is_dir():
        raise StateError(f"{listed}: names {tag!r}, which is no folder here; give the tag's folder")
    return path / tag


def step_of(value: Any, path: Path, name: str) -> int:
    """Returns a count of steps, which is a number or a tensor with one number.

    Raises:
        StateError: the value is no count.
    """
    if isinstance(value, PickledTensor) and value.num_elements == 1:
        value = value.load().item()
    number = expect(value, float, path, name)
    if not 0 <= number < 2**53 or number != int(number):
        raise StateError(f"{path}: {name} is {number}, which is no count of steps")
    return int(number)


def groups_of(value: Any, names: Sequence[tuple[str, ...]], path: Path) -> tuple[ForeignGroup, ...]:
    """Returns the groups of the optimizer's ``param_groups``. ``names``: parameters of each group,
    or of all groups together; others stay unknown.

    Raises:
        StateError: a group is no dictionary.
    """
    groups = expect_list(value, path, "param_groups")
    if len(names) != len(groups):
        names = (tuple(name for each in names for name in each),) if len(groups) == 1 else ()
    result = []
    for number, fields in enumerate(groups):
        fields = expect(fields, dict, path, f"param_groups[{number}]")
        result.append(group_of(fields, names[number] if number < len(names) else ()))
    return tuple(result)


def foreign(
    name: str,
    role: str,
    tensor: PickledTensor,
    root: Path,
    *,
    shape: tuple[int, ...] | None = None,
    load: Callable[[], torch.Tensor] | None = None,
) -> ForeignTensor:
    """Returns a tensor of a checkpoint, with the shape of the file by default."""
    shape = tensor.shape if shape is None else shape
    return ForeignTensor(
        name=plain_name(name),
        role=role,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        num_elements=tensor.num_elements,
        num_bytes=tensor.num_bytes,
        file=str(tensor.path.relative_to(root)),
        load=tensor.load if load is None else load,
    )


def narrowed(tensor: PickledTensor, start: int, count: int) -> PickledTensor:
    """Returns ``count`` elements of a tensor that is a row."""
    return replace(tensor, offset=tensor.offset + start, shape=(count,), stride=(1,))


def row(value: Any, path: Path, name: str) -> PickledTensor:
    """Returns a needed tensor that is one row without gaps.

    Raises:
        StateError: the value is another one.
    """
    tensor = expect(value, PickledTensor, path, name)
    if len(tensor.shape) != 1 or (tensor.num_elements > 1 and tensor.stride != (1,)):
        raise StateError(f"{path}: {name} has the shape {list(tensor.shape)}, in place of a row")
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """The contents of ``*_model_states.pt`` that an import uses. ``shapes``: parameters of each
    group, by name, as they lie in the flat tensors. ``is_round_robin``: DeepSpeed dealt parameters
    to ranks in turns.
    """

    path: Path
    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    frozen_shapes: Mapping[str, tuple[int, ...]]
    frozen: Mapping[str, PickledTensor]
    module: Mapping[str, PickledTensor]
    shared: Mapping[str, str]
    buffers: frozenset[str]
    global_steps: int | None
    global_samples: int | None
    skipped_steps: int
    dp_world_size: int | None
    is_round_robin: bool

    def weights(self, root: Path) -> Iterator[ForeignTensor]:
        """Yields tensors of the module that the optimizer does not train, and frozen parameters
        that lie whole in this file.
        """
        trained = {name for shapes in self.shapes for name in shapes}
        for name, tensor in {**self.module, **self.frozen}.items():
            shape = self.frozen_shapes.get(name, tensor.shape)
            if name in trained or name in self.shared or name in self.buffers:
                continue
            if tensor.num_elements and tensor.shape == shape:
                yield foreign(name, WEIGHT, tensor, root)


def read_model_states(path: Path) -> ModelStates:
    """Reads a file ``*_model_states.pt``.

    Raises:
        StateError: the file is damaged, or lacks a needed value.
    """
    fields = expect(load_torch(path), dict, path, "the content")
    counts = {
        key: step_of(fields[key], path, key)
        for key in ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
        if fields.get(key) is not None
    }
    shapes = fields.get("param_shapes") or []
    if isinstance(shapes, dict):
        shapes = [shapes]
    names = expect_list(fields.get("buffer_names") or [], path, "buffer_names")
    settings = fields.get("ds_config")
    zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
    return ModelStates(
        path=path,
        shapes=tuple(
            _shapes(each, path, "param_shapes")
            for each in expect_list(shapes, path, "param_shapes")
        ),
        frozen_shapes=_shapes(fields.get("frozen_param_shapes") or {}, path, "frozen_param_shapes"),
        frozen=_tensors(fields.get("frozen_param_fragments"), path, "frozen_param_fragments"),
        module=_tensors(fields.get("module"), path, "module"),
        shared=expect_items(fields.get("shared_params") or {}, str, path, "shared_params"),
        buffers=frozenset(name for name in names if isinstance(name, str)),
        global_steps=counts.get("global_steps"),
        global_samples=counts.get("global_samples"),
        skipped_steps=counts.get("skipped_steps", 0),
        dp_world_size=counts.get("dp_world_size"),
        is_round_robin=isinstance(zero, dict) and zero.get("round_robin_gradients") is True,
    )


def _shapes(value: Any, path: Path, name: str) -> Mapping[str, tuple[int, ...]]:
    shapes = {}
    for key, sizes in expect_items(value, object, path, name).items():
        numbers = expect_list(sizes, path, f"{name}[{key!r}]")
        shapes[key] = tuple(expect(n, int, path, f"{name}[{key!r}]") for n in numbers)
        if any(not 0 <= size < 2**40 for size in shapes[key]) or len(numbers) > 8:
            raise StateError(f"{path}: {name}[{key!r}] is {numbers}, which is no shape")
    return shapes


def _tensors(value: Any, path: Path, name: str) -> Mapping[str, PickledTensor]:
    """Returns the tensors of a dictionary; a pipeline's file has none."""
    items = expect_items(value or {}, object, path, name)
    return {key: item for key, item in items.items() if isinstance(item, PickledTensor)}
