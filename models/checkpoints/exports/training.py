"""The parameters of a saved state with the arrays and settings of their optimizer, as torch names
them. Each array is read alone, so that an export holds one of them in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from penstock.config.optimizers import Hyperparameter, OptimizerName
from penstock.config.training import OptimizerConfig
from penstock.host.errors import ConfigError, StateError
from penstock.models.checkpoints.constants import read_constants
from penstock.models.checkpoints.exports.tensors import ExportedTensors, saved_blocks, saved_tensors
from penstock.models.surgery.hf import load_run_config
from penstock.protocol.plan.groups import step_ranges
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.saved_base import base_paths
from penstock.shm.table import DType, TensorSpec

TORCH_OPTIMIZERS: Mapping[OptimizerName, type[torch.optim.Optimizer]] = MappingProxyType(
    {
        OptimizerName.ADAMW: torch.optim.AdamW,
        OptimizerName.ADAM: torch.optim.Adam,
        OptimizerName.SGD: torch.optim.SGD,
        OptimizerName.ADAGRAD: torch.optim.Adagrad,
    }
)
"""torch's optimizers with the state arrays of Penstock's, by name and meaning."""

_ARGUMENTS: Mapping[Hyperparameter, str] = MappingProxyType(
    {key: str(key) for key in Hyperparameter}
)
_WITHOUT_STEPS = (torch.optim.SGD,)
"""Optimizers without a count of steps in their state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParameter:
    """A parameter of a saved state.

    ``names``: all names in the model, in the order of its ``state_dict()``; torch's optimizers use
    the first. ``lr``: the rate of the next step. ``initial_lr``: the rate before schedules.
    """

    names: tuple[str, ...]
    block: int
    spec: TensorSpec
    lr: float
    initial_lr: float
    weight_decay: float

    @property
    def name(self) -> str:
        """The name that the optimizer's state uses."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """A saved state. ``parameters`` are in the order of ``named_parameters()``. ``constants`` are
    the persistent buffers. ``arrays``: the names of the optimizer's arrays. ``rate``: the learning
    rate of the next step. ``samples_seen`` and ``tokens_seen``: samples that were trained, and
    their places.
    """

    state_dir: Path
    step: int
    optimizer: OptimizerConfig
    source: ExportedTensors
    parameters: tuple[SavedParameter, ...]
    arrays: tuple[str, ...]
    base: Mapping[int, Path]
    rate: float
    samples_seen: int
    tokens_seen: int

    @classmethod
    def of(
        cls,
        run_dir: Path,
        state_dir: Path,
        *,
        step: int,
        rate: float,
        dtype: DType,
        samples_seen: int = 0,
    ) -> TrainingState:
        """Returns the state of step ``step``. ``rate``: the learning rate of the next step.
        ``dtype``: type of the written weights. ``samples_seen``: samples of the steps.

        Raises:
            StateError: the run's files are damaged.
        """
        files = RunDirectory(run_dir)
        source = ExportedTensors.of(
            load_run_config(run_dir),
            files.table,
            saved_blocks(state_dir, files.table),
            dtype=dtype,
            constants=read_constants(run_dir),
        )
        return cls(
            state_dir=state_dir,
            step=step,
            optimizer=files.config.optimizer,
            source=source,
            parameters=_parameters(source, files.config.optimizer, rate),
            arrays=tuple(files.table.state_arrays),
            base=base_paths(state_dir),
            rate=rate,
            samples_seen=samples_seen,
            tokens_seen=samples_seen * files.config.data.sequence_length,
        )

    def weight(self, parameter: SavedParameter) -> torch.Tensor:
        """Returns the weights of a parameter in the written type.

        Raises:
            ConfigError: the written type cannot hold a number.
            StateError: the file is damaged; names it.
        """
        spec, path = parameter.spec, self._path(parameter)
        if spec.trainable:
            value = self._read(path, spec.name, spec)
        else:
            value = self._read(self.base.get(parameter.block, path), f"frozen.{spec.name}", spec)
        return self.source.written(parameter.spec.name, value)

    def array(self, parameter: SavedParameter, name: str) -> torch.Tensor:
        """Returns an array of the optimizer's state, in fp32.

        Raises:
            StateError: the file is damaged; names it.
        """
        key = f"{name}.{parameter.spec.name}"
        return self._read(self._path(parameter), key, parameter.spec)

    def settings(self, parameter: SavedParameter) -> dict[str, Any]:
        """Returns the settings of the parameter's group: all that torch's optimizer has, and
        ``initial_lr``, which torch's schedulers of the rate add and ask for.
        """
        config, made = self.optimizer, torch_optimizer(self.optimizer.name)
        keys = config.name.traits.hyperparameters
        arguments: dict[str, Any] = {_ARGUMENTS[key]: getattr(config, key.value) for key in keys}
        arguments |= {"lr": parameter.lr, "weight_decay": parameter.weight_decay}
        (group,) = made([torch.empty(0)], **arguments).param_groups
        settings = {key: value for key, value in group.items() if key != "params"}
        return {**settings, "initial_lr": parameter.initial_lr}

    @property
    def counts_steps(self) -> bool:
        """Returns whether the optimizer's state has the number of steps for each parameter."""
        return torch_optimizer(self.optimizer.name) not in _WITHOUT_STEPS

    def _path(self, parameter: SavedParameter) -> Path:
        return self.state_dir / f"block-{parameter.block:04d}.safetensors"

    def _read(self, path: Path, key: str, spec: TensorSpec) -> torch.Tensor:
        ((_, value),) = saved_tensors(path, [key])
        if tuple(value.shape) != spec.shape:
            raise StateError(
                f"{path}: {key} has shape {list(value.shape)}, the run has {list(spec.shape)}"
            )
        return value


def torch_optimizer(name: OptimizerName) -> Any:
    """Returns torch's class of an optimizer.

    Raises:
        ConfigError: torch has no such optimizer.
    """
    if name not in TORCH_OPTIMIZERS:
        known = ", ".join(TORCH_OPTIMIZERS)
        raise ConfigError(
            f"optimizer.name: torch has no optimizer {name.value!r}, so no state of it can be"
            f" written for torch; the formats with an optimizer take {known}; --format hf writes"
            " the weights alone"
        )
    return TORCH_OPTIMIZERS[name]


def _parameters(
    source: ExportedTensors, config: OptimizerConfig, rate: float
) -> tuple[SavedParameter, ...]:
    first = {names[0]: names for names in _names_in_order(source.skeleton.model)}
    names_of = {name: names for names in first.values() for name in names}
    made: dict[str, SavedParameter] = {}
    for block in source.table.blocks:
        ranges = step_ranges(config, source.table, block.index)
        for spec in block.tensors:
            holding = (each for each in ranges if each.start <= spec.offset < each.end)
            step = next(holding, None) if spec.trainable else None
            names = names_of[spec.name]
            made[names[0]] = SavedParameter(
                names=tuple(names),
                block=block.index,
                spec=spec,
                lr=rate * (1.0 if step is None else step.rate),
                initial_lr=config.lr * (1.0 if step is None else step.rate),
                weight_decay=0.0 if step is None else step.weight_decay,
            )
    return tuple(made[name] for name in first if name in made)


def _names_in_order(model: Any) -> list[list[str]]:
    """Returns the names of each parameter, in the order of the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())
