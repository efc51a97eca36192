"""The meaning of keys in a DCP folder: weights, the optimizer's arrays, settings, and the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.dcp.metadata import METADATA, ChunkedTensor, Contents, Slice, Values
from penstock.models.exchange.foreign import WEIGHT, ForeignGroup, group_of
from penstock.models.exchange.pickles import PickledTensor, expect
from penstock.models.exchange.unpickler import StandIn

STEP = "step"
_OPTIMIZERS = frozenset({"optimizer", "optimizers", "optim"})
_MODELS = frozenset({"model", "models", "model_state", "model_state_dict", "state_dict", "module"})
_COUNTERS = frozenset({STEP, "global_step"})
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_STATE, _GROUPS = "state.", "param_groups."


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedContents:
    """The contents of a checkpoint by meaning.

    ``tensors``: by parameter and role. ``steps``: the optimizer's steps by parameter. ``counters``:
    steps that the trainer counts, by key. ``others``: keys without a meaning for an import.
    """

    tensors: Mapping[tuple[str, str], ChunkedTensor]
    steps: Mapping[str, int]
    groups: tuple[ForeignGroup, ...]
    counters: Mapping[str, int]
    others: tuple[str, ...]


def named(contents: Contents) -> NamedContents:
    """Returns the contents by meaning; reads the small values.

    Raises:
        ConfigError: the optimizer's parameters have numbers and no names, or a tensor is there
            twice.
        StateError: a value is damaged; names the file.
    """
    values, path = Values(contents.folder), contents.folder / METADATA
    tensors: dict[tuple[str, str], ChunkedTensor] = {}
    steps: dict[str, int] = {}
    counters: dict[str, int] = {}
    settings: dict[str, Slice | ChunkedTensor] = {}
    others: list[str] = []
    for keys, place in _entries(contents):
        optimizer = _optimizer_key(keys)
        if optimizer is None:
            name = _weight_name(keys)
            if name is not None and isinstance(place, ChunkedTensor) and place.shape:
                _add(tensors, name, WEIGHT, place, path)
            elif keys[-1] in _COUNTERS and (number := _number(values, place, path)) is not None:
                counters[".".join(keys)] = _count(number, path, keys[-1])
            else:
                others.append(".".join(keys))
        elif optimizer.startswith(_GROUPS):
            settings[optimizer.removeprefix(_GROUPS)] = place
        else:
            name, _, array = optimizer.removeprefix(_STATE).rpartition(".")
            name = without_wrappers(name)
            if array == STEP:
                steps[name] = _count(_number(values, place, path), path, optimizer)
            elif isinstance(place, ChunkedTensor):
                _add(tensors, name, array, place, path)
            else:
                others.append(".".join(keys))
    names = dict.fromkeys(name for name, role in tensors if role != WEIGHT) | dict.fromkeys(steps)
    _refuse_numbers(names, path)
    return NamedContents(
        tensors=tensors,
        steps=steps,
        groups=_groups(settings, values, path),
        counters=counters,
        others=tuple(others),
    )


def _add(
    tensors: dict[tuple[str, str], ChunkedTensor],
    name: str,
    role: str,
    tensor: ChunkedTensor,
    path: Path,
) -> None:
    first = tensors.setdefault((name, role), tensor)
    if first is not tensor:
        raise ConfigError(
            f"{path}: {first.key} and {tensor.key} are both the {role} of {name}; save the"
            " checkpoint with one of the two"
        )


def without_wrappers(name: str) -> str:
    """Returns a parameter's name without the parts of wrappers."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def _entries(contents: Contents) -> Iterable[tuple[tuple[str, ...], ChunkedTensor | Slice]]:
    yield from contents.tensors.items()
    yield from contents.values.items()


def _optimizer_key(keys: Sequence[str]) -> str | None:
    """Returns the key below the optimizer; None for keys of other parts."""
    for position, key in enumerate(keys[:-1]):
        if key in _OPTIMIZERS:
            below = ".".join(keys[position + 1 :])
            return below if below.startswith((_STATE, _GROUPS)) else None
    below = ".".join(keys)
    return below if below.startswith((_STATE, _GROUPS)) else None


def _weight_name(keys: Sequence[str]) -> str | None:
    """Returns the parameter's name; None for keys of other parts, such as a loader of data."""
    if len(keys) > 1 and keys[-2] not in _MODELS:
        return None
    return without_wrappers(keys[-1])


def _number(values: Values, place: ChunkedTensor | Slice, path: Path) -> float | None:
    """Returns a number that is saved as a value or as a tensor; None for another value."""
    if isinstance(place, ChunkedTensor):
        return float(place.load().item()) if place.num_elements == 1 else None
    value = values.read(place)
    if isinstance(value, PickledTensor):
        return float(value.load().item()) if value.num_elements == 1 else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _count(value: float | None, path: Path, key: str) -> int:
    number = expect(value, float, path, key)
    if not (number >= 0 and number.is_integer()):
        raise StateError(f"{path}: {key} is {number}, in place of a number of steps")
    return int(number)


def _refuse_numbers(names: Iterable[str], path: Path) -> None:
    numbers = [name for name in names if name.isdecimal()]
    if numbers:
        raise ConfigError(
            f"{path}: the optimizer's state has numbers in place of names (state.{numbers[0]});"
            " save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )


def _groups(
    settings: Mapping[str, Slice | ChunkedTensor], values: Values, path: Path
) -> tuple[ForeignGroup, ...]:
    """Returns the groups. Their keys are ``<name>.<setting>``, or ``<number>.<setting>`` with a
    list of names.
    """
    by_owner: dict[str, dict[str, Any]] = {}
    for key, place in settings.items():
        owner, _, setting = key.rpartition(".")
        if isinstance(place, ChunkedTensor):
            value: Any = _number(values, place, path)
        else:
            value = _plain(values.read(place))
        by_owner.setdefault(owner, {})[setting] = value
    members: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for owner, group in by_owner.items():
        names = group.pop("params", [without_wrappers(owner)])
        listed = names if isinstance(names, list) else []
        known = members.setdefault(repr(sorted(group.items())), (group, []))
        known[1].extend(without_wrappers(name) for name in listed if isinstance(name, str))
    return tuple(group_of(group, tuple(names)) for group, names in members.values())


def _plain(value: Any, *, in_list: bool = False) -> Any:
    """Returns a value of plain types; tensors of one number become numbers. A list inside of a list
    is left out, as a few lists that name one another have billions of items.
    """
    if isinstance(value, PickledTensor):
        return float(value.load().item()) if value.num_elements == 1 else "a tensor"
    if isinstance(value, StandIn):
        return value.name
    if isinstance(value, list | tuple) and not in_list:
        return [_plain(item, in_list=True) for item in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__
