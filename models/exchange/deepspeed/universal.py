"""Universal checkpoints of DeepSpeed: ``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``.

Stages 1 and 2 write a dictionary with ``param``, stage 3 a bare row without a shape. Only the files
of parameters are needed: other files give groups, samples and frozen parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.host.errors import ConfigError, StateError
from penstock.models.checkpoints.files import few
from penstock.models.exchange.deepspeed.common import (
    MOMENTS,
    ModelStates,
    compared_with_adapter,
    foreign,
    groups_of,
    plain_name,
    read_model_states,
    step_of,
    tagged,
)
from penstock.models.exchange.deepspeed.zero import frozen_tensors, rank_states
from penstock.models.exchange.foreign import MASTER, ForeignGroup, ForeignState, ForeignTensor
from penstock.models.exchange.pickles import PickledTensor, expect, load_torch

LATEST = "latest_universal"
"""File with the name of the folder."""

_ROLES = {"fp32": MASTER, **{name: name for name in MOMENTS}}


class UniversalReader:
    """Reads universal checkpoints."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has universal files, or names such a folder."""
        return (path / "zero").is_dir() or (path / LATEST).is_file()

    def open(self, path: Path) -> ForeignState:
        """Lists the tensors from headers.

        Raises:
            ConfigError: an expert or a vocabulary was saved in a form that is not read.
            StateError: a file is missing or damaged; names the file.
        """
        root = tagged(path, LATEST)
        folders = sorted(each for each in (root / "zero").glob("*") if each.is_dir())
        tensors: list[ForeignTensor] = []
        steps: dict[str, int] = {}
        problems: list[str] = []
        for folder in folders:
            roles = {}
            for tensor in _parameter(folder, root):
                roles[tensor.role] = tensor
            if MASTER not in roles:
                problems.append(
                    f"{folder}: has no fp32.pt; convert the checkpoint again with ds_to_universal"
                )
            tensors += roles.values()
            step = folder / "step.pt"
            if step.is_file():
                steps[plain_name(folder.name)] = step_of(load_torch(step), step, "step")
        if not tensors:
            raise StateError(f"{root / 'zero'}: has no folder with fp32.pt; copy the checkpoint")
        states = _model_states(root)
        masters = {tensor.name for tensor in tensors}
        if states is not None:
            problems += _mixed(states, tensors, root)
            tensors += (each for each in _others(states, root) if each.name not in masters)
        saved = _optimizer_state(root)
        state = ForeignState(
            kind="deepspeed-universal",
            path=root,
            tensors=tuple(tensors),
            step=_step(steps, saved),
            steps=steps,
            samples_seen=None if states is None else states.global_samples,
            groups=_groups(saved, states),
            problems=tuple(problems),
        )
        return compared_with_adapter(state)


def _parameter(folder: Path, root: Path) -> Iterator[ForeignTensor]:
    for key, role in _ROLES.items():
        path = folder / f"{key}.pt"
        if not path.is_file():
            continue
        value = load_torch(path)
        if not isinstance(value, dict):
            tensor = expect(value, PickledTensor, path, "the content")
            # Stage 3 writes every parameter as a row: the shape is unknown.
            shape = None if len(tensor.shape) == 1 else tensor.shape
            yield replace(foreign(folder.name, role, tensor, root), shape=shape)
            continue
        if value.get("is_expert_param"):
            raise ConfigError(
                f"{path}: is a parameter of DeepSpeed's experts, which transformers names"
                " otherwise; export the model with DeepSpeed, and import its weights"
            )
        if value.get("sub_param_shape") is not None:
            raise ConfigError(
                f"{path}: is a parameter of several parts (sub_param_shape), in an order that"
                " transformers does not have; save it without tensor parallelism"
            )
        yield foreign(
            folder.name, role, expect(value.get("param"), PickledTensor, path, "param"), root
        )


def _model_states(root: Path) -> ModelStates | None:
    files = sorted(root.glob("*mp_rank_00*_model_states.pt"))
    return read_model_states(files[0]) if files else None


def _others(states: ModelStates, root: Path) -> Iterator[ForeignTensor]:
    """Yields tensors that the optimizer does not train. Stage 3 leaves frozen parameters in the
    files of its ranks.
    """
    tensors = {tensor.name: tensor for tensor in states.weights(root)}
    if states.frozen_shapes and states.path.name.startswith("zero_"):
        ranks = rank_states(root, states.dp_world_size or 1)
        tensors |= {tensor.name: tensor for tensor in frozen_tensors(ranks, root)}
    yield from tensors.values()


def _mixed(states: ModelStates, tensors: Sequence[ForeignTensor], root: Path) -> Iterator[str]:
    """Yields a problem if masters are not the model's weights. DeepSpeed's converter (0.19.8) takes
    parameters of ``round_robin_gradients`` in another order than that of their numbers.
    """
    if not states.is_round_robin:
        return
    module = {plain_name(name): tensor for name, tensor in states.module.items()}
    differing = []
    for tensor in tensors:
        if tensor.role == MASTER and tensor.name in module:
            weights = module[tensor.name].load().reshape(-1)
            if not torch.equal(tensor.load().reshape(-1).to(weights.dtype), weights):
                differing.append(tensor.name)
    if differing:
        yield (
            f"{root / 'zero'}: {few(differing)} are not the weights in {states.path.name}:"
            " ds_to_universal mixes parameters of round_robin_gradients; import the directory that"
            " was converted"
        )


def _optimizer_state(root: Path) -> tuple[Path, dict[Any, Any]] | None:
    path = root / "zero" / "optimizer_state.pt"
    if not path.is_file():
        return None
    return path, expect(load_torch(path), dict, path, "the content")


def _step(steps: dict[str, int], saved: tuple[Path, dict[Any, Any]] | None) -> int | None:
    """Returns the optimizer's steps: those of ``step.pt``, or the one that stage 3 keeps."""
    if steps:
        return next(iter(steps.values())) if len(set(steps.values())) == 1 else None
    if saved is None:
        return None
    path, fields = saved
    inner = fields.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and "step" in state:
            return step_of(state["step"], path, "step")
    return None


def _groups(
    saved: tuple[Path, dict[Any, Any]] | None, states: ModelStates | None
) -> tuple[ForeignGroup, ...]:
    if saved is None or "param_groups" not in saved[1]:
        return ()
    shapes = () if states is None else states.shapes
    names = [tuple(plain_name(name) for name in each) for each in shapes]
    groups = groups_of(saved[1]["param_groups"], names, saved[0])
    # Penstock's exports have the same settings for each parameter, without a name.
    return tuple({repr(group): group for group in groups}.values())
