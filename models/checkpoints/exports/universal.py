"""Export for DeepSpeed: a universal checkpoint with weights and optimizer.

DeepSpeed loads the folder with ``checkpoint: {load_universal: true}``, in any ZeRO stage and with
any number of ranks. Each parameter has a folder ``zero/<name>`` with a file for each array. One
tensor at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.config.optimizers import OptimizerName
from penstock.host.errors import ConfigError, StateError
from penstock.models.checkpoints.exports.training import SavedParameter, TrainingState

_ADAM = (OptimizerName.ADAM, OptimizerName.ADAMW)
_MASTER = "fp32"
_ARRAYS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_LATEST = "latest_universal"
_DS_VERSION = "0.19.8"
"""Version of DeepSpeed with this form of the files, which readers compare."""


def outline_universal(state: TrainingState) -> dict[str, torch.Tensor]:
    """Returns the tensors by their files, on the meta device.

    Raises:
        ConfigError: the optimizer is not Adam or AdamW.
    """
    _check(state)
    return {
        f"zero/{parameter.name}/{array}": torch.empty(parameter.spec.shape, device="meta")
        for parameter in state.parameters
        for array in _arrays(parameter)
    }


def write_universal(state: TrainingState, directory: Path, verifies: bool) -> None:
    """Writes the checkpoint, and the file that names its folder. ``verifies``: reads every tensor
    back and compares.

    Raises:
        ConfigError: the optimizer is not Adam or AdamW.
        StateError: a file of the saved state is damaged. Or a verified tensor differs.
    """
    _check(state)
    tag = f"global_step{state.step}"
    (directory / _LATEST).write_text(tag)
    folder = directory / tag
    step = torch.tensor(float(state.step))
    for parameter in state.parameters:
        target = folder / "zero" / parameter.name
        target.mkdir(parents=True)
        for array in _arrays(parameter):
            # A view of a larger storage would be written with the whole storage.
            value = _value(state, parameter, array).contiguous().clone()
            torch.save({"param": value, "cat_dim": 0}, target / f"{array}.pt")
        if parameter.spec.trainable:
            torch.save(step, target / "step.pt")
    torch.save(_optimizer_state(state, step), folder / "zero" / "optimizer_state.pt")
    # Stage 3 opens the file of the second name.
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        torch.save(_model_states(state), folder / f"{name}_model_states.pt")
    if verifies:
        _verify(state, folder)


def _check(state: TrainingState) -> None:
    if state.optimizer.name not in _ADAM:
        raise ConfigError(
            f"optimizer.name: {state.optimizer.name.value} has no universal form; DeepSpeed's files"
            f" have Adam's state; --format hf writes the weights alone"
        )


def _arrays(parameter: SavedParameter) -> tuple[str, ...]:
    return (_MASTER, *_ARRAYS) if parameter.spec.trainable else (_MASTER,)


def _value(state: TrainingState, parameter: SavedParameter, array: str) -> torch.Tensor:
    if array == _MASTER:
        return state.weight(parameter).to(torch.float32)
    return state.array(parameter, array)


def _groups(state: TrainingState) -> list[dict[str, Any]]:
    """Returns a group for each parameter, as no optimizer there has more groups. Stages 1 and 2
    load a group only if the file has a group of the same number.

    DeepSpeed copies the settings into its groups, and stage 3 copies those of the first into all.
    So the files name only settings that all parameters share: DeepSpeed keeps its own of the rest.
    """
    settings = [state.settings(each) for each in state.parameters if each.spec.trainable]
    equal = {
        key: value
        for key, value in settings[0].items()
        if key in _SETTINGS and all(other[key] == value for other in settings)
    }
    # FusedAdam keeps the steps in its group.
    return [{**equal, "step": state.step, "params": [n]} for n in range(len(settings))]


def _optimizer_state(state: TrainingState, step: torch.Tensor) -> dict[str, Any]:
    groups = _groups(state)
    return {
        "zero_stage": 1,
        "ds_version": _DS_VERSION,
        "param_groups": groups,
        # Stage 3 reads steps and settings at this place.
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }


def _model_states(state: TrainingState) -> dict[str, Any]:
    """Returns the counts that DeepSpeed goes on from. Schedulers of DeepSpeed and of torch read
    their own keys of ``lr_scheduler``.
    """
    scheduler = {
        "last_batch_iteration": state.step - 1,
        "last_epoch": state.step,
        "_step_count": state.step + 1,
        "lr_lambdas": [None] * len(_groups(state)),
    }
    return {
        "module": dict(state.source.constants),
        "buffer_names": list(state.source.constants),
        "optimizer": None,
        "lr_scheduler": scheduler,
        "global_steps": state.step,
        "global_samples": state.samples_seen,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        "ds_version": _DS_VERSION,
    }


def _verify(state: TrainingState, folder: Path) -> None:
    for parameter, array, path in _files(state, folder):
        # This process has just written the file.
        written = torch.load(path, mmap=True, weights_only=True)["param"]
        if not torch.equal(written, _value(state, parameter, array)):
            raise StateError(
                f"--verify: {path.parent.name}/{path.name} differs from the saved state; the export"
                " is not kept"
            )


def _files(state: TrainingState, folder: Path) -> Iterator[tuple[SavedParameter, str, Path]]:
    for parameter in state.parameters:
        for array in _arrays(parameter):
            yield parameter, array, folder / "zero" / parameter.name / f"{array}.pt"
