"""The kinds of checkpoints that Penstock reads."""

from __future__ import annotations

from pathlib import Path

from penstock.host.errors import ConfigError
from penstock.models.exchange.dcp.joined import AutomodelReader
from penstock.models.exchange.dcp.reader import DcpReader
from penstock.models.exchange.deepspeed.universal import UniversalReader
from penstock.models.exchange.deepspeed.zero import ZeroReader
from penstock.models.exchange.folders import AdapterFolder, ModelFolder, SavedState
from penstock.models.exchange.foreign import ForeignState, Reader
from penstock.models.exchange.trainer import TrainerCheckpoint

READERS: tuple[Reader, ...] = (
    SavedState(),
    DcpReader(),
    AutomodelReader(),
    UniversalReader(),
    ZeroReader(),
    TrainerCheckpoint(),
    AdapterFolder(),
    ModelFolder(),
)
"""Asked in this order; the first that recognises a path reads it."""


def open_checkpoint(path: Path) -> ForeignState:
    """Returns the checkpoint at ``path``.

    Raises:
        ConfigError: there is no such path, or no reader recognises it.
        StateError: a file is missing or damaged; names the file.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")
    for reader in READERS:
        if reader.recognises(path):
            return reader.open(path)
    if inner := sorted(path.glob("checkpoint-*"), key=_number):
        raise ConfigError(f"{path}: has checkpoints of transformers' Trainer; give {inner[-1]}")
    raise ConfigError(
        f"{path}: is no checkpoint that Penstock reads; give a folder of Torch DCP (.metadata), of"
        " DeepSpeed (zero/, or *_optim_states.pt), of transformers' Trainer (optimizer.pt), or a"
        " model folder (*.safetensors)"
    )


def _number(path: Path) -> int:
    """Returns the step in the name of a Trainer's checkpoint; 0 without a step."""
    digits = path.name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
