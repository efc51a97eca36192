"""Reader of checkpoints of transformers' Trainer (``checkpoint-N/``).

``optimizer.pt`` numbers its parameters. The Trainer makes two groups: parameters with weight decay,
then the others, each in the order of ``named_parameters()``. Frozen parameters have no number. A
name is given only where the numbers of parameters and all shapes agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, is_file, parse_json
from penstock.models.adapters.files import SETTINGS
from penstock.models.checkpoints.conversion import all_names
from penstock.models.checkpoints.files import few
from penstock.models.exchange.dcp.joined import fsdp_shards, has_fsdp_shards
from penstock.models.exchange.folders import (
    ModelWeights,
    adapter_weights,
    fitted_adapter,
    model_weights,
)
from penstock.models.exchange.foreign import (
    ForeignSchedule,
    ForeignState,
    ForeignTensor,
    finite,
    group_of,
    other_rule,
)
from penstock.models.exchange.pickles import (
    PickledTensor,
    expect,
    expect_list,
    load_torch,
)
from penstock.models.exchange.unpickler import StandIn
from penstock.models.surgery.skeleton import Skeleton

STATE, OPTIMIZER, SCHEDULE = "trainer_state.json", "optimizer.pt", "scheduler.pt"
_WHOLE = "optimizer.bin"
"""Name of the optimizer's state that FSDP has gathered."""
_KIND = "trainer"
_ARGUMENTS = "training_args.bin"
_REMEDY = "give --weights-only"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ADAMW_KEYS = frozenset(
    {
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable"),
        *("differentiable", "fused", "decoupled_weight_decay", "params", "param_names"),
        "initial_lr",
    }
)
"""Settings in a group of torch's AdamW, and of the schedulers around the optimizer."""
_OLD_RULE = ("bias",)
"""Parts of names without weight decay in transformers before 4.46, with those of LayerNorms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbered:
    """A parameter of ``optimizer.pt``; its state by the names of the arrays. The ``number`` is a
    text, as keys of pickles are.
    """

    number: str
    arrays: Mapping[str, PickledTensor]
    step: int | None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The parameter's shape; None before its first step."""
        return next((tensor.shape for tensor in self.arrays.values()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group of ``optimizer.pt``. ``names``: those that torch saved, if any."""

    members: tuple[_Numbered, ...]
    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Optimizer:
    """The optimizer's state. ``problems`` leave only the weights to use."""

    path: Path
    groups: tuple[_Group, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    """The Trainer's progress. ``samples_seen`` None: the files do not say."""

    step: int | None = None
    samples_seen: int | None = None
    samples_note: str = ""
    optimizer: str | None = None
    notes: tuple[str, ...] = ()


class TrainerCheckpoint:
    """Reads checkpoints of transformers' Trainer."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has the Trainer's state or its optimizer's."""
        return path.is_dir() and (is_file(path / STATE) or is_file(path / OPTIMIZER))

    def open(self, path: Path) -> ForeignState:
        """Lists the tensors from headers and pickles.

        Raises:
            ConfigError: the checkpoint has DeepSpeed's or FSDP's form; names the folder to give.
            StateError: weights are missing or damaged.
        """
        is_adapter = is_file(path / SETTINGS)
        if has_fsdp_shards(path) and not is_adapter:
            return _of_shards(path)
        _refuse_distributed(path)
        progress = _progress(path)
        weights = ModelWeights(tensors=adapter_weights(path)) if is_adapter else model_weights(path)
        whole = is_file(path / _WHOLE) and not is_file(path / OPTIMIZER)
        optimizer = _read_optimizer(path / (_WHOLE if whole else OPTIMIZER), progress.optimizer)
        schedule, notes = _read_schedule(path / SCHEDULE, len(optimizer.groups))
        state = ForeignState(
            kind=_KIND,
            path=path,
            tensors=weights.tensors,
            step=progress.step,
            samples_seen=progress.samples_seen,
            samples_note=progress.samples_note,
            model_settings=weights.settings,
            schedule=schedule,
            problems=weights.problems,
            state_problems=optimizer.problems,
            notes=(*weights.notes, *progress.notes, *notes),
        )
        if weights.composite is not None:
            problem = f"{path}: the optimizer's state of a model of several parts is not read"
            return replace(state, state_problems=(f"{problem}; {_REMEDY}",))
        skeleton = weights.skeleton
        groups = None if skeleton is None else _named(optimizer, skeleton, None)

        def fit(model: Skeleton, trained: Collection[str]) -> ForeignState:
            if is_adapter:
                fitted = fitted_adapter(state, path, model)
            else:
                fitted = state
            names = groups or _named(optimizer, model, trained)
            return _with_optimizer(fitted, optimizer, names)

        return replace(_with_optimizer(state, optimizer, groups), fit=fit)


def _of_shards(path: Path) -> ForeignState:
    """Returns a checkpoint with FSDP's shards."""
    state, progress = fsdp_shards(path, _KIND), _progress(path)
    return replace(
        state,
        step=progress.step if state.step is None else state.step,
        samples_seen=progress.samples_seen,
        notes=(*state.notes, *progress.notes),
    )


def _refuse_distributed(path: Path) -> None:
    folders = sorted(each.name for each in path.iterdir() if each.is_dir())
    for name in folders:
        if name.startswith("global_step"):
            raise ConfigError(f"{path}: DeepSpeed saved the optimizer; give {path / name}")
        if name.startswith(("pytorch_model_fsdp_", "optimizer_")):
            raise ConfigError(
                f"{path}: FSDP saved the state in shards; load it with the Trainer and save it with"
                " fsdp_state_dict_type FULL_STATE_DICT, or give --weights-only with the folder of a"
                " saved model"
            )


def _progress(path: Path) -> _Progress:
    """Returns the Trainer's progress by ``trainer_state.json``.

    Raises:
        StateError: the file is damaged.
    """
    file = path / STATE
    arguments = _arguments(path / _ARGUMENTS)
    name = arguments.get("optim")
    optimizer = str(name.args[0]) if isinstance(name, StandIn) and name.args else None
    if not is_file(file):
        note = f"{file}: is missing, so the step is that of the optimizer"
        return _Progress(optimizer=optimizer, notes=(note,))
    try:
        fields = expect(parse_json(file.read_bytes()), dict, file, "its content")
    except (OSError, *DAMAGED) as error:
        raise StateError(f"{file}: is damaged ({error}); copy the checkpoint again") from error
    step = _count(fields, "global_step", 0, file)
    accumulation = arguments.get("gradient_accumulation_steps")
    if fields.get("train_batch_size") is None or not isinstance(accumulation, int):
        return _Progress(step=step, optimizer=optimizer)
    batch, ranks = _count(fields, "train_batch_size", 1, file), _num_ranks(path)
    note = (
        f"samples seen: {step} steps of {batch} samples, {accumulation} times, in {ranks} processes"
    )
    if isinstance(epoch := fields.get("epoch"), int | float) and epoch > 1:
        note += "; the last batches of an epoch may have been smaller, --samples-seen corrects"
    return _Progress(
        step=step,
        samples_seen=step * batch * accumulation * ranks,
        samples_note=note,
        optimizer=optimizer,
    )


def _count(fields: Mapping[Any, Any], key: str, least: int, file: Path) -> int:
    value = fields.get(key)
    if type(value) is not int or value < least:
        raise StateError(
            f"{file}: {key} is {value!r:.40}, in place of a whole number of at least {least};"
            " copy the checkpoint again"
        )
    return value


def _num_ranks(path: Path) -> int:
    """Returns the number of processes, by their files."""
    return max(1, len(list(path.glob("rng_state_*.pth"))))


def _arguments(path: Path) -> Mapping[str, Any]:
    """Returns the arguments of the Trainer; nothing if the file is missing or damaged."""
    try:
        value = load_torch(path)
    except StateError:
        return {}
    return value.attributes if isinstance(value, StandIn) else {}


def _read_optimizer(path: Path, name: str | None) -> _Optimizer:
    """Returns the state in ``optimizer.pt``. ``name``: value of the Trainer's ``optim``."""
    if not is_file(path):
        return _Optimizer(path=path, problems=(f"{path}: is missing; {_REMEDY}",))
    try:
        fields = expect(load_torch(path), dict, path, "the optimizer's state")
        if "state" not in fields or "param_groups" not in fields:
            raise StateError(f"{path}: has no state and param_groups of a torch optimizer")
        states = expect(fields["state"], dict, path, "state")
        listed = expect_list(fields["param_groups"], path, "param_groups")
        settings = [expect(group, dict, path, "a group") for group in listed]
        if problem := _other_optimizer(path, name, states, settings):
            return _Optimizer(path=path, problems=(problem,))
        groups = tuple(_group(path, group, states) for group in settings)
        members = Counter(member.number for group in groups for member in group.members)
        if repeated := sorted(number for number, count in members.items() if count > 1):
            raise StateError(
                f"{path}: param_groups have the parameters {few(repeated)} more than once"
            )
        if others := [number for number in states if number not in members]:
            raise StateError(f"{path}: no group has the parameters {few(others)} of its state")
    except StateError as error:
        return _Optimizer(path=path, problems=(f"{error}; or {_REMEDY}",))
    if not any(member.arrays for group in groups for member in group.members):
        problem = f"{path}: the optimizer has no state, as before its first step; {_REMEDY}"
        return _Optimizer(path=path, problems=(problem,))
    return _Optimizer(path=path, groups=groups)


def _other_optimizer(
    path: Path, name: str | None, states: Mapping[Any, Any], groups: Sequence[Mapping[Any, Any]]
) -> str | None:
    """Returns a problem if the optimizer is not AdamW as Penstock computes it."""
    keys = {key for entry in states.values() if isinstance(entry, dict) for key in entry}
    others = sorted(str(key) for key in keys - {"step", *_MOMENTS})
    settings = sorted({str(key) for group in groups for key in group} - _ADAMW_KEYS)
    named = "the optimizer" if name is None else f"the optimizer {name}"
    if rule := other_rule(groups):
        return f"{path}: {rule}; {_REMEDY}"
    if others:
        return f"{path}: {named} keeps {few(others)}; only AdamW's state is read; {_REMEDY}"
    if settings:
        return f"{path}: {named} has the settings {few(settings)}, AdamW has not; {_REMEDY}"
    if keys and not keys >= set(_MOMENTS):
        return f"{path}: {named} keeps {few(sorted(map(str, keys)))}, not AdamW's; {_REMEDY}"
    return None


def _group(path: Path, fields: Mapping[Any, Any], states: Mapping[Any, Any]) -> _Group:
    numbers = expect_list(fields.get("params"), path, "params of a group")
    names = fields.get("param_names")
    if names is None and numbers and all(isinstance(number, str) for number in numbers):
        names = numbers
    listed = () if names is None else expect_list(names, path, "param_names of a group")
    return _Group(
        members=tuple(_numbered(path, number, states) for number in numbers),
        names=tuple(_plain(expect(each, str, path, "a name")) for each in listed),
        settings={
            key: value for key, value in fields.items() if key not in ("params", "param_names")
        },
    )


def _numbered(path: Path, number: Any, states: Mapping[Any, Any]) -> _Numbered:
    if not isinstance(number, int | str):
        raise StateError(f"{path}: a parameter has a number of type {type(number).__name__}")
    number = str(number)
    entry = expect(states.get(number, {}), dict, path, f"state[{number}]")
    arrays = {
        name: expect(entry[name], PickledTensor, path, f"{name} of parameter {number}")
        for name in _MOMENTS
        if name in entry
    }
    if len({tensor.shape for tensor in arrays.values()}) > 1 or len(arrays) == 1:
        raise StateError(f"{path}: exp_avg and exp_avg_sq of parameter {number} do not match")
    step = _number(entry.get("step"))
    if isinstance(step, PickledTensor):
        raise StateError(f"{path}: step of parameter {number} has {step.num_elements} numbers")
    if step is not None and not _is_count(step):
        raise StateError(f"{path}: step of parameter {number} is {step!r}, in place of a count")
    return _Numbered(number=number, arrays=arrays, step=None if step is None else int(step))


def _is_count(value: Any) -> bool:
    """Returns whether a number counts steps; torch keeps the count in fp32."""
    return finite(value) is not None and value >= 0 and value == int(value)


def _plain(name: str) -> str:
    """Returns a name without the prefixes of wrappers."""
    parts = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in parts)


def _read_schedule(path: Path, num_groups: int) -> tuple[ForeignSchedule | None, tuple[str, ...]]:
    """Returns the state in ``scheduler.pt``, if it has the learning rates of the optimizer's
    groups, and notes.
    """
    if not num_groups or not is_file(path):
        return None, ()
    try:
        fields = expect(load_torch(path), dict, path, "the schedule's state")
        rates = _numbers(fields.get("_last_lr"), path, "_last_lr")
        bases = _numbers(fields.get("base_lrs", []), path, "base_lrs")
        if len(rates) != num_groups or len(bases) not in (0, num_groups):
            raise StateError(
                f"{path}: _last_lr has {len(rates)} rates and base_lrs {len(bases)}, the optimizer"
                f" has {num_groups} groups"
            )
        # Schedules that follow the losses count evaluations, and have no base_lrs.
        steps = expect(fields.get("last_epoch"), int, path, "last_epoch") if bases else None
    except StateError as error:
        return None, (f"the schedule's rates are not compared: {error}",)
    notes: tuple[str, ...] = ()
    if not bases:
        notes = (f"{path}: the schedule follows the losses; optimizer.schedule has no such curve",)
    schedule = ForeignSchedule(file=path.name, rates=rates, base_rates=bases, steps=steps)
    return schedule, notes


def _numbers(value: Any, path: Path, name: str) -> tuple[float, ...]:
    items = [_number(item) for item in expect_list(value, path, name)]
    numbers = tuple(expect(item, float, path, f"an item of {name}") for item in items)
    if not all(map(math.isfinite, numbers)):
        raise StateError(f"{path}: {name} has a number that is not finite")
    return numbers


def _number(value: Any) -> Any:
    """Returns the number of a tensor with one element, and other values as they are."""
    if isinstance(value, PickledTensor) and value.num_elements == 1:
        return value.load().item()
    return value


def _named(
    optimizer: _Optimizer, skeleton: Skeleton, trained: Collection[str] | None
) -> list[tuple[str, ...]] | None:
    """Returns the names of each group's parameters; None if no rule gives all of them.

    ``trained``: names of the trained parameters; None: all are.
    """
    groups = optimizer.groups
    if not groups:
        return None
    if all(len(group.names) == len(group.members) for group in groups):
        return [group.names for group in groups]
    for partition in _partitions(skeleton, trained):
        names = _filled(groups, partition)
        if names is not None and _fits(groups, names, skeleton):
            return names
    return None


def _partitions(skeleton: Skeleton, trained: Collection[str] | None) -> Iterator[list[list[str]]]:
    """Yields the groups that the Trainer or a plain optimizer makes of a model's parameters."""
    # Imported here: it takes seconds.
    from transformers.trainer import Trainer
    from transformers.trainer_pt_utils import get_parameter_names

    model = skeleton.model
    aliases = {name: names for names in all_names(skeleton).values() for name in names}
    order = [name for name, _ in model.named_parameters()]
    if trained is not None:
        chosen = set(trained)
        order = [name for name in order if chosen & set(aliases.get(name, [name]))]
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    yield [[n for n in order if n in decayed], [n for n in order if n not in decayed]]
    yield [order]
    before = set(get_parameter_names(model, [nn.LayerNorm], _OLD_RULE))  # type: ignore[no-untyped-call]
    yield [[n for n in order if n in before], [n for n in order if n not in before]]


def _filled(
    groups: Sequence[_Group], partition: Sequence[Sequence[str]]
) -> list[tuple[str, ...]] | None:
    """Returns the names by group if the sizes agree. Empty groups have no names."""
    parts = [part for part in partition if part]
    filled: list[tuple[str, ...]] = []
    for group in groups:
        if not group.members:
            filled.append(())
        elif parts and len(parts[0]) == len(group.members):
            filled.append(tuple(parts.pop(0)))
        else:
            return None
    return None if parts else filled


def _fits(groups: Sequence[_Group], names: Sequence[Sequence[str]], skeleton: Skeleton) -> bool:
    shapes = {name: tuple(value.shape) for name, value in skeleton.model.named_parameters()}
    return all(
        member.shape is None or member.shape == shapes[name]
        for group, listed in zip(groups, names, strict=True)
        for member, name in zip(group.members, listed, strict=True)
    )


def _with_optimizer(
    state: ForeignState, optimizer: _Optimizer, names: Sequence[Sequence[str]] | None
) -> ForeignState:
    """Returns a checkpoint with the state of the optimizer."""
    problems = list(state.state_problems)
    if names is None and optimizer.groups:
        sizes = " and ".join(str(len(group.members)) for group in optimizer.groups)
        problems.append(
            f"{optimizer.path}: has groups of {sizes} parameters without names, and they are not"
            " those that the Trainer makes of the model; exclude the frozen ones by train.freeze,"
            f" or {_REMEDY}"
        )
    tensors, groups, steps = list(state.tensors), [], {}
    for number, group in enumerate(optimizer.groups):
        listed = [f"parameter {member.number}" for member in group.members]
        listed = listed if names is None else list(names[number])
        settings = {key: _number(value) for key, value in group.settings.items()}
        groups.append(group_of(settings, () if names is None else tuple(listed)))
        for name, member in zip(listed, group.members, strict=True):
            tensors += _moments(name, member, optimizer.path.name)
            if member.step is not None:
                steps[name] = member.step
    counts, notes = set(steps.values()), list(state.notes)
    step = counts.pop() if len(counts) == 1 else state.step
    if state.step not in (None, step):
        notes.append(
            f"{STATE}: global_step is {state.step}, the optimizer has {step} steps, from which the"
            " run goes on"
        )
    return replace(
        state,
        tensors=tuple(tensors),
        step=step,
        notes=tuple(notes),
        steps=steps,
        groups=tuple(groups),
        state_problems=tuple(problems),
    )


def _moments(name: str, member: _Numbered, file: str) -> Iterator[ForeignTensor]:
    for role, tensor in member.arrays.items():
        yield ForeignTensor(
            name=name,
            role=role,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            num_elements=tensor.num_elements,
            num_bytes=tensor.num_bytes,
            file=file,
            load=tensor.load,
        )
