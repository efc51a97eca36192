"""Checkpoints with the optimizer in a DCP folder of its own.

accelerate writes FSDP's shards so, inside of a folder of transformers' Trainer. NeMo Automodel
writes each checkpoint so. Its weights are another DCP folder, a model folder of Hugging Face, or
safetensors of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.host.errors import ConfigError
from penstock.host.files import is_file
from penstock.models.adapters.files import SETTINGS
from penstock.models.exchange.dcp.metadata import METADATA, read_contents
from penstock.models.exchange.dcp.names import NamedContents, named
from penstock.models.exchange.dcp.reader import state_of
from penstock.models.exchange.dcp.shards import sharded_weights
from penstock.models.exchange.folders import model_weights
from penstock.models.exchange.foreign import WEIGHT, ForeignState

_MODEL, _OPTIMIZER, _CONSOLIDATED = "model", "optim", "consolidated"
_FSDP_MODEL, _FSDP_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def has_fsdp_shards(path: Path) -> bool:
    """Returns whether a folder of the Trainer has FSDP's shards of model and optimizer."""
    return all(is_file(path / name / METADATA) for name in (_FSDP_MODEL, _FSDP_OPTIMIZER))


def fsdp_shards(path: Path, kind: str) -> ForeignState:
    """Returns the weights and the optimizer's state in FSDP's shards.

    Raises:
        ConfigError: the checkpoint is of a form that is not read; names the remedy.
        StateError: a file is missing or damaged; names the file.
    """
    parts = [named(read_contents(path / name)) for name in (_FSDP_MODEL, _FSDP_OPTIMIZER)]
    return state_of(path, _joined(parts), kind)


class AutomodelReader:
    """Reads a checkpoint of NeMo Automodel, such as ``epoch_0_step_20``."""

    def recognises(self, path: Path) -> bool:
        """Returns whether a folder has a model, and the optimizer in a DCP folder."""
        return is_file(path / _OPTIMIZER / METADATA) and (path / _MODEL).is_dir()

    def open(self, path: Path) -> ForeignState:
        """Lists the tensors.

        Raises:
            ConfigError: the weights are those of an adapter; names the remedy.
            StateError: a file is missing or damaged; names the file.
        """
        model = path / _MODEL
        optimizer = named(read_contents(path / _OPTIMIZER))
        if is_file(model / METADATA):
            parts = [named(read_contents(model)), optimizer]
            return state_of(path, _joined(parts), "automodel")
        if is_file(model / SETTINGS):
            raise ConfigError(
                f"{model}: is an adapter, of which Automodel's optimizer is not read; give"
                f" {model} and --weights-only"
            )
        shards = {(name, WEIGHT): each for name, each in sharded_weights(model).items()}
        # Consolidated weights may have a narrower type: that of the model that was tuned.
        if shards or not (model / _CONSOLIDATED).is_dir():
            tensors = {**shards, **optimizer.tensors}
            return state_of(path, replace(optimizer, tensors=tensors), "automodel")
        weights = model_weights(model / _CONSOLIDATED)
        state = state_of(path, optimizer, "automodel")
        folder = f"{_MODEL}/{_CONSOLIDATED}"
        named_files = [replace(each, file=f"{folder}/{each.file}") for each in weights.tensors]
        return replace(
            state,
            tensors=(*named_files, *state.tensors),
            problems=(*weights.problems, *state.problems),
            notes=(*weights.notes, *state.notes),
        )


def _joined(parts: Sequence[NamedContents]) -> NamedContents:
    return NamedContents(
        tensors={key: tensor for part in parts for key, tensor in part.tensors.items()},
        steps={name: step for part in parts for name, step in part.steps.items()},
        groups=tuple(group for part in parts for group in part.groups),
        counters={key: count for part in parts for key, count in part.counters.items()},
        others=tuple(other for part in parts for other in part.others),
    )
