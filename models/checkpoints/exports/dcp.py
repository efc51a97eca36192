"""Export for torch: a folder of torch.distributed.checkpoint with weights and optimizer.

The keys are ``model.<name>``, ``optimizer.state.<name>.<array>`` and
``optimizer.param_groups.<name>.<setting>``, as ``get_state_dict`` makes them with
``flatten_optimizer_state_dict`` (:mod:`torch.distributed.checkpoint.state_dict`).
A layout may have other names, such as torchtitan's. torch itself writes and reads the folder. One
tensor at a time is in memory.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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


class Layout(Protocol):
    """Names and rows of a trainer's parameters. ``section``: the key of the weights; empty: the
    weights are at the top.
    """

    section: str

    def name(self, name: str) -> str:
        """Returns the trainer's name of transformers' parameter."""

    def moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's weights or moments with the trainer's order of rows."""

    def others(self) -> dict[str, dict[str, Any]]:
        """Returns plain values that the trainer loads, by section and key."""


class PlainLayout:
    """transformers' names and rows."""

    section = MODEL

    def __init__(self, state: TrainingState) -> None:
        """Takes the saved state, as other layouts do."""

    def name(self, name: str) -> str:
        """Returns the name."""
        return name

    def moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return tensor

    def others(self) -> dict[str, dict[str, Any]]:
        """Returns nothing."""
        return {}


LayoutOf = Callable[[TrainingState], Layout]


def outline_dcp(state: TrainingState, layout_of: LayoutOf = PlainLayout) -> dict[str, torch.Tensor]:
    """Returns the tensors by their keys, on the meta device.

    Raises:
        ConfigError: the layout has no place for the model or its optimizer.
    """
    values, loads = _described(state, layout_of(state))
    plain = _flat(values)
    return {key: plain[key] for key in loads}


def write_dcp(
    state: TrainingState, directory: Path, verifies: bool, layout_of: LayoutOf = PlainLayout
) -> None:
    """Writes the folder. ``verifies``: torch reads it again, and every value is compared.

    Raises:
        ConfigError: the layout has no place for the model or its optimizer.
        StateError: a file of the saved state is damaged. Or a verified value differs.
    """
    values, loads = _described(state, layout_of(state))
    with _alone():
        save(values, checkpoint_id=directory, planner=_Saving(loads), no_dist=True)
    if verifies:
        verify_dcp(state, directory, layout_of)


def verify_dcp(state: TrainingState, directory: Path, layout_of: LayoutOf = PlainLayout) -> None:
    """Reads the folder by torch, and compares every value with the saved state.

    Raises:
        StateError: a file of the saved state is damaged. Or a value differs.
    """
    values, loads = _described(state, layout_of(state))
    plain = _flat(values)
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


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by their full keys."""
    flat: dict[str, Any] = {}
    for section, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": each for key, each in value.items()}
        else:
            flat[section] = value
    return flat


def _described(state: TrainingState, layout: Layout) -> tuple[dict[str, Any], dict[str, _Load]]:
    """Returns the values by section and key, with tensors on the meta device, and the loaders of
    the tensors by their full keys.
    """
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    loads: dict[str, _Load] = {}

    def add(section: str, key: str, read: _Load, like: torch.Tensor) -> None:
        part = optimizer if section == OPTIMIZER else model
        part[key] = like
        loads[f"{section}.{key}" if section else key] = read

    for parameter in state.parameters:
        shape = parameter.spec.shape
        like = torch.empty(shape, dtype=state.source.dtypes[parameter.spec.name], device="meta")
        moved = partial(layout.moved, parameter.name)
        for name in parameter.names:
            read = partial(_moved, moved, partial(state.weight, parameter))
            add(layout.section, layout.name(name), read, like)
        if not parameter.spec.trainable:
            continue
        owner = layout.name(parameter.name)
        for array in state.arrays:
            like = torch.empty(shape, dtype=torch.float32, device="meta")
            read = partial(_moved, moved, partial(state.array, parameter, array))
            add(OPTIMIZER, f"state.{owner}.{array}", read, like)
        if state.counts_steps:
            step = torch.tensor(float(state.step))
            add(OPTIMIZER, f"state.{owner}.step", step.clone, step.to("meta"))
        for setting, value in state.settings(parameter).items():
            optimizer[f"param_groups.{owner}.{setting}"] = value
    for name, constant in state.source.constants.items():
        add(layout.section, layout.name(name), constant.clone, constant.to("meta"))
    weights = {layout.section: model} if layout.section else model
    return {**weights, OPTIMIZER: optimizer, **layout.others()}, loads


def _moved(move: Callable[[torch.Tensor], torch.Tensor], load: _Load) -> torch.Tensor:
    return move(load())


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
