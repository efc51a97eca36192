"""Export for torch: a folder of torch.distributed.checkpoint with weights and optimizer.

The keys are ``model.<name>``, ``optimizer.state.<name>.<array>`` and
``optimizer.param_groups.<name>.<setting>``, as ``get_state_dict`` makes them with
``flatten_optimizer_state_dict`` (:mod:`torch.distributed.checkpoint.state_dict`).
torch itself writes and reads the folder. One tensor at a time is in memory.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.host.errors import StateError
from penstock.models.checkpoints.exports.training import TrainingState

MODEL, OPTIMIZER = "model", "optimizer"
_Load = Callable[[], torch.Tensor]


def outline_dcp(state: TrainingState) -> dict[str, torch.Tensor]:
    """Returns the tensors by their keys, on the meta device."""
    values, loads = _described(state)
    named = {
        f"{section}.{key}": value for section in values for key, value in values[section].items()
    }
    return {key: named[key] for key in loads}


def write_dcp(state: TrainingState, directory: Path, verifies: bool) -> None:
    """Writes the folder. ``verifies``: torch reads it again, and every value is compared.

    Raises:
        StateError: a file of the saved state is damaged. Or a verified value differs.
    """
    values, loads = _described(state)
    with _alone():
        save(values, checkpoint_id=directory, planner=_Saving(loads), no_dist=True)
    if verifies:
        verify_dcp(state, directory)


def verify_dcp(state: TrainingState, directory: Path) -> None:
    """Reads the folder by torch, and compares every value with the saved state.

    Raises:
        StateError: a file of the saved state is damaged. Or a value differs.
    """
    values, loads = _described(state)
    plain = {f"{s}.{key}": value for s, part in values.items() for key, value in part.items()}
    planner = _Comparing(plain, loads, directory)
    with _alone():
        load(dict(plain), checkpoint_id=directory, planner=planner, no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns that one process writes or reads alone, which is the intent.
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            yield
        except CheckpointException as error:
            # torch wraps errors by rank; the one here has a message for the user.
            for failure, _ in error.failures.values():
                raise failure from error
            raise


def _described(state: TrainingState) -> tuple[dict[str, dict[str, Any]], dict[str, _Load]]:
    """Returns the values by section and key, with tensors on the meta device, and the loaders of
    the tensors by their full keys.
    """
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    loads: dict[str, _Load] = {}

    def add(
        section: dict[str, Any], prefix: str, key: str, read: _Load, like: torch.Tensor
    ) -> None:
        section[key] = like
        loads[f"{prefix}.{key}"] = read

    for parameter in state.parameters:
        shape = parameter.spec.shape
        like = torch.empty(shape, dtype=state.source.dtypes[parameter.spec.name], device="meta")
        for name in parameter.names:
            add(model, MODEL, name, partial(state.weight, parameter), like)
        if not parameter.spec.trainable:
            continue
        key = f"state.{parameter.name}"
        for array in state.arrays:
            like = torch.empty(shape, dtype=torch.float32, device="meta")
            read = partial(state.array, parameter, array)
            add(optimizer, OPTIMIZER, f"{key}.{array}", read, like)
        if state.counts_steps:
            step = torch.tensor(float(state.step))
            add(optimizer, OPTIMIZER, f"{key}.step", step.clone, step.to("meta"))
        for setting, value in state.settings(parameter).items():
            optimizer[f"param_groups.{parameter.name}.{setting}"] = value
    for name, constant in state.source.constants.items():
        add(model, MODEL, name, constant.clone, constant.to("meta"))
    return {MODEL: model, OPTIMIZER: optimizer}, loads


class _Saving(DefaultSavePlanner):
    """A planner that loads a tensor when torch writes it."""

    def __init__(self, loads: Mapping[str, _Load]) -> None:
        super().__init__()
        self._loads = loads

    def lookup_object(self, index: Any) -> Any:
        if index.fqn in self._loads:
            return self._loads[index.fqn]().contiguous()
        return super().lookup_object(index)


class _Comparing(DefaultLoadPlanner):
    """A planner that compares each value that torch reads, and keeps none."""

    def __init__(
        self, plain: Mapping[str, Any], loads: Mapping[str, _Load], directory: Path
    ) -> None:
        super().__init__()
        self._plain, self._loads, self._directory = plain, loads, directory

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # The inherited method would allocate every tensor that is on the meta device.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        key = read_item.dest_index.fqn
        return torch.empty(self._plain[key].shape, dtype=self._plain[key].dtype)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        key = read_item.dest_index.fqn
        self._check(key, torch.equal(self._loads[key](), tensor))

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        # This process has just written the bytes, so the pickle is its own.
        self._check(key, torch.load(value, weights_only=True) == self._plain[key])

    def _check(self, key: str, is_equal: bool) -> None:
        if not is_equal:
            raise StateError(
                f"--verify: {key} differs from the saved state in {self._directory}; the export is"
                " not kept"
            )
